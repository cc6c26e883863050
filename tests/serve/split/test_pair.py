"""Two workers at work: the same tokens, at the same time, over one pool."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from quantkit.errors import ArtifactError, EnvironmentProblem, SourceError, UsageError
from quantkit_serve.paging import PageRef
from quantkit_serve.phase import Phase
from quantkit_serve.request import FinishReason
from quantkit_serve.split.engine import SplitEngine
from quantkit_serve.split.pair import Pair
from quantkit_serve.split.process import Opening
from tests.serve.engine.fake import WORDS, alone, config, request
from tests.serve.split.harness import Split, is_there, openings, serve, split_config, until


def test_answers_are_those_of_one_process(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    requests = []
    for i in range(14):
        prompt = [*range(1, 10), *rng.integers(4, 60, rng.integers(1, 18)).tolist()][(i % 3) * 4 :]
        sampling = {"temperature": 1.0, "seed": i} if i == 3 else {}
        requests.append(request(f"r{i}", prompt, int(rng.integers(1, 24)), ignore_eos=True, **sampling))

    async def test(split: Split) -> None:
        for phase in Phase:  # a terminal sends these to all; the engine decides what they mean
            os.kill(split.pid(phase), signal.SIGINT)
            os.kill(split.pid(phase), signal.SIGTERM)
        answers = await asyncio.gather(*(split.submit(one) for one in requests))
        for one, (tokens, last) in zip(requests, answers, strict=True):
            assert last.finish is FinishReason.LENGTH
            if not one.params.temperature:
                assert tokens == alone(one)
        figures = split.service.figures()
        assert figures.prefill_steps and figures.decode_steps
        long = sum(one.params.max_tokens > 1 for one in requests)
        assert long <= sum(figures.handoff_seconds.counts) <= long + figures.preemptions
        assert figures.handoff_seconds.total_s > 0
        assert figures.kv_tag_mismatches == 0 and figures.worker_restarts == {"prefill": 0, "decode": 0}
        assert (tmp_path / "threads-prefill").read_text() == "1"
        assert (tmp_path / "threads-decode").read_text() == "2"
        assert split.service.health().is_ok

    serve(tmp_path, test, config(pages=24))


def test_both_phases_compute_at_the_same_time(tmp_path: Path) -> None:
    first, second = request("a", range(4, 20), 9, ignore_eos=True), request("b", [9, 8, 7], 6, ignore_eos=True)

    async def test(split: Split) -> None:
        split.hold("decode")
        one = split.submit(first)
        await split.until_held("decode")
        split.hold("prefill")
        other = split.submit(second)
        await split.until_held("prefill")
        split.service.abort("a")  # while the decode worker writes to its pages
        assert (await one)[1].finish is FinishReason.ABORT
        assert split.service.figures().num_pages_quarantined == 1  # the others are of the prefix cache now
        split.let_go("decode", "prefill")
        assert (await other)[0] == alone(second)
        assert split.service.figures().num_pages_quarantined == 0

    serve(tmp_path, test)


@pytest.mark.parametrize("what", ["tag", "table", "content"])
def test_a_hand_off_that_does_not_fit_ends_its_request_only(tmp_path: Path, what: str) -> None:
    requests = [request(name, [i, 5, 6, 7, 8, 9], 8, ignore_eos=True) for i, name in enumerate("abc", 10)]

    async def test(split: Split) -> None:
        write = split.core.handoffs.write

        def corrupt(sequence, seals):  # type: ignore[no-untyped-def]
            message = write(sequence, seals)
            if sequence.request_id != "b":
                return message
            first, *rest = message.refs
            if what == "tag":
                return message._replace(refs=(PageRef(first.page, first.tag + 1), *rest))
            if what == "table":
                return message._replace(refs=tuple(rest))
            split.pair.scribble(first.page)
            return message

        split.core.handoffs.write = corrupt  # type: ignore[method-assign]
        answers = await asyncio.gather(*(split.submit(one) for one in requests))
        for one, (tokens, last) in zip(requests, answers, strict=True):
            if one.request_id == "b":
                assert last.finish is FinishReason.ERROR and "hand-off check failed" in (last.error or "")
                assert tokens == alone(one)[:1]
            else:
                assert tokens == alone(one)
        assert split.service.figures().kv_tag_mismatches == (what != "content")

    serve(tmp_path, test, config(prefix=False), split_config(has_canary=True))


def test_parties_that_do_not_fit_together(tmp_path: Path) -> None:
    for name, value in (("kv_format_id", "other"), ("pair_id", "other")):
        with pytest.raises(ArtifactError, match=f"{name} '(other|fake|pair)'") as caught:
            Pair(openings(tmp_path, decode={name: value}), split_config())
        assert str(caught.value).count("--split") == 1


def test_a_worker_that_can_not_start(tmp_path: Path) -> None:
    (tmp_path / "refuse-decode").touch()
    with pytest.raises(SourceError, match="decode: is refused"):
        Pair(openings(tmp_path), split_config())
    dying = openings(tmp_path) | {Phase.DECODE: Opening("os:_exit", {"status": 7})}
    with pytest.raises(EnvironmentProblem, match="the decode worker has ended with status 7"):
        Pair(dying, split_config())
    (tmp_path / "refuse-decode").unlink()
    (tmp_path / "hold-load-decode").touch()
    with pytest.raises(EnvironmentProblem, match="stuck in loading the model for more than 2 s"):
        Pair(openings(tmp_path), split_config(load_limit_s=2.0))


def test_an_engine_that_can_not_be_leaves_no_workers(tmp_path: Path) -> None:
    pair = Pair(openings(tmp_path), split_config())
    pids = [runner.pid for runner in pair.runners.values()]
    with pytest.raises(UsageError, match="less than one page"):
        SplitEngine(pair, config(pages=0), split_config(), WORDS)
    assert not [pid for pid in pids if pid is None or is_there(pid)]


def test_the_memory_of_the_pool_is_what_workers_write(tmp_path: Path) -> None:
    async def test(split: Split) -> None:
        assert not split.pair.memory.any()
        await split.collect(request("a", [4, 5, 6], 2, ignore_eos=True))
        assert split.pair.memory.any(axis=1).sum() == 1
        assert split.pair.memory.shape == (64, 1000)
        await until(lambda: not split.core.has_work)

    serve(tmp_path, test)
