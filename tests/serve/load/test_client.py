"""One request: what is timed, what is counted, and every way to fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import httpx
import pytest

from quantkit.errors import EnvironmentProblem, QuantkitError, UsageError
from quantkit_serve.load import client as client_module
from quantkit_serve.load.client import API_KEY, Client
from quantkit_serve.load.record import Record

from .fake import DONE, Body, FakeServer, event, serving, token, usage

WHOLE = (token("a"), token("b"), usage(3, 2), DONE)


class Pieces(httpx.AsyncByteStream):
    """A body whose pieces come at given seconds of a clock that only they move."""

    def __init__(self, pieces: Sequence[bytes | Exception], clock: list[float]) -> None:
        self.pieces, self.clock = pieces, clock

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            self.clock[0] += 1.0
            if isinstance(piece, Exception):
                raise piece
            yield piece


def ask(monkeypatch: pytest.MonkeyPatch, *pieces: bytes | Exception, status: int = 200) -> Record:
    clock = [100.0]
    monkeypatch.setattr(client_module.time, "perf_counter", lambda: clock[0])
    transport = httpx.MockTransport(lambda request: httpx.Response(status, stream=Pieces(pieces, clock)))

    async def run() -> Record:
        async with Client("http://x", transport=transport) as client:
            return await client.complete("m", [1, 2, 3], 2)

    return asyncio.run(run())


def test_times_are_of_chunks_with_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    record = ask(monkeypatch, b": hello\n\n", *WHOLE)
    assert record == Record(100.0, 105.0, (102.0, 103.0), 3, 2)
    assert (record.ttft_s, record.e2e_s, record.itl_s, record.tpot_s) == (2.0, 3.0, [1.0], 1.0)


def test_a_chunk_counts_when_its_last_byte_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = b"".join(WHOLE)
    cut = len(token("a")) - 1
    record = ask(monkeypatch, stream[:5], stream[5:cut], stream[cut:])
    assert record.chunks_s == (103.0, 103.0)


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        (
            (token(), event({"error": {"message": "KV page check failed"}}), DONE),
            "error in the stream: KV page check",
        ),
        ((token(), event({"error": "gone"})), "error in the stream: gone"),
        ((token(), token(), usage(3, 2)), "ended without [DONE]"),
        ((token(), DONE), "has no usage"),
        ((usage(3, 0), DONE), "the answer is empty"),
        ((), "ended without [DONE]"),
        ((b"data: {nonsense\n\n",), "not JSON: {nonsense"),
        ((b"data: [1]\n\n",), "not an object"),
        ((b"data: \xff\xfe\n\n",), "not UTF-8"),
        ((token(), httpx.ReadTimeout("")), "ReadTimeout"),
        ((token(), httpx.RemoteProtocolError("peer closed")), "RemoteProtocolError: peer closed"),
    ],
)
def test_failures_are_returned(
    monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes | Exception, ...], says: str
) -> None:
    record = ask(monkeypatch, *pieces)
    assert record.error is not None and says in record.error
    assert (record.prompt_tokens, record.output_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (429, b'{"error": {"message": "too many"}}', "HTTP 429: too many"),
        (500, b"Internal Server Error", "HTTP 500: Internal Server Error"),
        (503, b"", "HTTP 503: no message"),
        (400, b'{"detail": "x"}', 'HTTP 400: {"detail": "x"}'),
        (502, b"y" * 1000, "yyy ..."),
    ],
)
def test_statuses_are_failures(monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, says: str) -> None:
    record = ask(monkeypatch, body, status=status)
    assert record.error is not None and says in record.error and len(record.error) < 300


async def dies(body: Body) -> AsyncIterator[bytes]:
    yield token()
    yield token()[:9]
    raise ConnectionResetError


def test_a_server_that_dies_in_the_middle() -> None:
    async def run(url: str) -> Record:
        async with Client(url) as client:
            return await client.complete("m", "text", 2)

    with serving(FakeServer(dies)) as server:
        record = asyncio.run(run(server.url))
        url = server.url
    assert record.error is not None and "RemoteProtocolError" in record.error and len(record.chunks_s) == 1
    gone = asyncio.run(run(url))
    assert gone.error is not None and "ConnectError" in gone.error


def test_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "secret")

    async def run(url: str) -> None:
        async with Client(f"{url}/v1/") as client:
            assert await client.model() == "fake"
            assert await client.tokenize("fake", "ab") == [97, 98]
            await client.complete("fake", (1, 2), 5)
            await client.complete("fake", "text", 5, ignores_eos=False)

    with serving(FakeServer()) as server:
        asyncio.run(run(server.url))
    first, second = server.requests
    assert first == {
        "model": "fake", "prompt": [1, 2], "max_tokens": 5, "temperature": 0.0, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    assert second == {k: v for k, v in first.items() if k != "ignore_eos"} | {"prompt": "text"}
    assert server.headers[0]["authorization"] == "Bearer secret"


def test_a_key_that_no_header_holds_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "sec\nret")
    with pytest.raises(UsageError) as caught:
        Client("http://x")
    assert "sec" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:99999"])
def test_urls(url: str) -> None:
    with pytest.raises(UsageError):
        Client(url)


def preparation(status: int, content: str, call: str) -> QuantkitError:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=content))

    async def run() -> None:
        async with Client("http://x", transport=transport) as client:
            await (client.model() if call == "model" else client.tokenize("m", "text"))

    with pytest.raises(QuantkitError) as caught:
        asyncio.run(run())
    return caught.value


@pytest.mark.parametrize(
    ("status", "content", "call", "kind", "says"),
    [
        (401, '{"error": {"message": "no"}}', "model", EnvironmentProblem, API_KEY),
        (200, "hello", "model", EnvironmentProblem, "not a JSON object"),
        (200, '{"data": []}', "model", EnvironmentProblem, "names no model"),
        (200, '{"data": [{"id": "a"}, {"id": "b"}]}', "model", UsageError, "accepted: a, b"),
        (404, "", "tokenize", EnvironmentProblem, "--prompts random"),
        (200, '{"tokens": ["a"]}', "tokenize", EnvironmentProblem, "no token ids"),
    ],
)
def test_preparation_raises(status: int, content: str, call: str, kind: type[QuantkitError], says: str) -> None:
    error = preparation(status, content, call)
    assert isinstance(error, kind) and says in str(error)
