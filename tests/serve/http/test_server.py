"""Listening, and leaving: a real process that drains."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from quantkit.errors import EnvironmentProblem
from quantkit_serve.http.server import Server, address, listen

from .fakes import make

CODE = """
import asyncio, sys
from quantkit_serve.http.server import Server, listen
from tests.serve.http.fakes import make
service, app = make()
service.endless = True
Server(app, drain_s=float(sys.argv[1])).run_on(listen("127.0.0.1", 0), lambda url: print(url, flush=True))
print("left", service.num_starts, service.num_stops, len(service.live))
"""


def started(drain_s: float) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, str(drain_s)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def lines(response: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in response.iter_lines() if line)


def until_draining(client: httpx.Client) -> dict[str, str]:
    for _ in range(500):
        if (got := client.get("/health")).status_code == 503:
            return dict(got.json())
        time.sleep(0.01)
    raise AssertionError("never drained")


@pytest.mark.parametrize("signals", [1, 2])
def test_answers_finish_then_the_server_leaves(signals: int) -> None:
    """The first signal: nothing new, what runs goes on. The second: what runs is ended, and told so."""
    process, url = started(30.0)
    body = {"prompt": "a", "stream": True, "max_tokens": 40 if signals == 1 else 200}
    with httpx.Client(base_url=url, timeout=20) as client:
        with client.stream("POST", "/v1/completions", json=body) as response:
            said = lines(response)
            next(said)
            process.send_signal(signal.SIGTERM)
            assert until_draining(client)["status"] == "draining"
            refused = client.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            if signals == 2:
                process.send_signal(signal.SIGTERM)
            *_, last, done = said
        assert done == "[DONE]"
        if signals == 1:
            assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        else:
            assert json.loads(last)["error"]["code"] == "unavailable"
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert out.strip() == "left 1 1 0"


def test_an_engine_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    service, app = make()

    async def failing() -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(service, "start", failing)
    with listen("127.0.0.1", 0) as listening, pytest.raises(EnvironmentProblem, match="did not start"):
        Server(app, log_level="critical").run_on(listening)


def test_an_address_that_is_taken_or_none() -> None:
    with listen("127.0.0.1", 0) as taken:
        with pytest.raises(EnvironmentProblem, match="can't listen"):
            listen("127.0.0.1", taken.getsockname()[1])
        assert address(taken) == f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(EnvironmentProblem):
        listen("no.such.host.invalid", 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_ipv6_address() -> None:
    try:
        listening = listen("::1", 0)
    except EnvironmentProblem:
        pytest.skip("no IPv6 loopback here")
    with listening:
        assert address(listening).startswith("http://[::1]:")
