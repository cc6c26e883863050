"""``quantkit bench serve`` against a server that does as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from quantkit.cli.main import main

from .fake import DONE, Answer, Body, FakeServer, serving, token, usage, whole


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FakeServer()) as started:
        yield started


def bench(capsys: pytest.CaptureFixture[str], url: str, *more: str) -> Result:
    capsys.readouterr()
    code = main(["bench", "serve", "--url", url, *more])
    return Result(code, *capsys.readouterr())


SMALL = ("--num-prompts", "12", "--input-len", "20", "--output-len", "5")


def together(server: FakeServer, first: int, count: int) -> Answer:
    """From the request number ``first`` on nobody is answered before ``count`` have been under way at once."""

    async def answer(body: Body) -> AsyncIterator[bytes]:
        while len(server.requests) >= first and server.most_at_once < count:
            await asyncio.sleep(0.001)
        async for piece in whole(body):
            yield piece

    return answer


def test_a_sweep(capsys: pytest.CaptureFixture[str], server: FakeServer, tmp_path: Path) -> None:
    server.answer = together(server, 1 + 2 + 12 + 2 + 1, 4)
    plot = tmp_path / "load.svg"
    more = ("--concurrency", "1,4", "--price-per-hour", "3.6", "--plot", str(plot), "--json")
    result = bench(capsys, server.url, *SMALL, *more)
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert [level["concurrency"] for level in document["levels"]] == [1, 4]
    for level in document["levels"]:
        assert (level["answered"], level["failed"], level["short"]) == (12, 0, 0)
        assert (level["prompt_tokens"], level["output_tokens"]) == (240, 60)
        assert level["output_throughput"] == pytest.approx(60 / level["duration_s"])
        assert level["cost_per_million_output"] == pytest.approx(3.6 / 3600 * level["duration_s"] / 60 * 1e6)
        assert level["peak_in_flight"] == level["concurrency"]
        assert level["ttft_ms"]["median"] <= level["e2e_ms"]["p99"]
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    assert server.most_at_once == 4
    prompts = [tuple(body["prompt"]) for body in server.requests]
    assert len(prompts) == len(set(prompts)) == 1 + 2 * (2 + 12)
    assert all(body["ignore_eos"] and body["max_tokens"] == 5 for body in server.requests)


def test_tables(capsys: pytest.CaptureFixture[str], server: FakeServer) -> None:
    result = bench(capsys, server.url, *SMALL, "--rate", "500,1000", "--prompts", "random", "--vocab-size", "9")
    assert result.code == 0, result.err
    assert "rate" in result.out and "500/s" in result.out and "1000/s" in result.out
    for name in ("time to first token", "time per output token", "between tokens", "end to end"):
        assert result.out.count(name) == 2
    assert "level 2 of 2: 12 of 12 requests" in result.err
    assert {t for body in server.requests for t in body["prompt"]} == set(range(9))


async def every_third_fails(body: Body) -> AsyncIterator[bytes]:
    if body["prompt"][0] % 3 == 0:
        yield token()
        raise ConnectionResetError
    async for piece in whole(body):
        yield piece


def test_failures_are_counted_named_and_exit_1(capsys: pytest.CaptureFixture[str], server: FakeServer) -> None:
    server.answer = every_third_fails
    random = ("--prompts", "random", "--vocab-size", "100", "--warmup", "0")
    for seed in range(100):  # the first request must succeed, or nothing is measured
        result = bench(capsys, server.url, *SMALL, *random, "--seed", str(seed), "--json")
        if result.code != 4:
            break
    failed = sum(body["prompt"][0] % 3 == 0 for body in server.requests[-12:])
    level = json.loads(result.out)["levels"][0]
    assert result.code == 1 and failed > 0
    assert (level["answered"], level["failed"]) == (12 - failed, failed)
    assert level["output_tokens"] == 5 * (12 - failed)
    assert f"warning: concurrency 1: {failed} of 12 requests failed: RemoteProtocolError" in result.err


async def stops_early(body: Body) -> AsyncIterator[bytes]:
    yield token()
    yield usage(len(body["prompt"]), 1)
    yield DONE


def test_short_answers_are_said(capsys: pytest.CaptureFixture[str], server: FakeServer) -> None:
    server.answer = stops_early
    result = bench(capsys, server.url, *SMALL, "-q")
    assert result.code == 0 and "12 answers are shorter than 5 tokens" in result.err
    result = bench(capsys, server.url, *SMALL, "-q", "--stop-at-eos")
    assert result.code == 0 and result.err == ""
    assert "ignore_eos" not in server.requests[-1]


def test_a_server_that_refuses_everything(capsys: pytest.CaptureFixture[str], server: FakeServer) -> None:
    server.status = 429
    result = bench(capsys, server.url, *SMALL)
    assert (result.code, result.out) == (4, "")
    assert "the first request failed: HTTP 429: too many" in result.err
    assert len(server.requests) == 1


def test_a_server_without_a_tokenizer(capsys: pytest.CaptureFixture[str], server: FakeServer) -> None:
    server.has_tokenizer = False
    result = bench(capsys, server.url, *SMALL)
    assert result.code == 4 and "--prompts random with --vocab-size" in result.err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--concurrency", "1", "--rate", "2"), "exclude each other"),
        (("--concurrency", "0"), "not a list of positive whole numbers"),
        (("--concurrency", "1,x"), "not a list of positive whole numbers"),
        (("--rate", "inf"), "not a list of positive numbers"),
        (("--rate", "nan"), "not a list of positive numbers"),
        (("--price-per-hour", "nan"), "a finite number"),
        (("--price-per-hour", "inf"), "a finite number"),
        (("--prompts", "random"), "need the size of the vocabulary"),
        (("--vocab-size", "9"), "is for --prompts random"),
        (("--plot", "no/such/place.svg"), "the directory of"),
    ],
)
def test_usage(capsys: pytest.CaptureFixture[str], more: tuple[str, ...], says: str) -> None:
    result = bench(capsys, "http://127.0.0.1:9", *more)
    assert (result.code, result.out) == (2, "") and says in result.err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(capsys, "http://127.0.0.1:9")
    assert result.code == 4 and "ConnectError" in result.err and "Does the server run?" in result.err


def test_too_few_windows(capsys: pytest.CaptureFixture[str], server: FakeServer) -> None:
    result = bench(capsys, server.url, "--input-len", "1", "--num-prompts", "500")
    assert result.code == 2 and "too few different windows" in result.err
