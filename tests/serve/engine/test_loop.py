"""The engine in its thread, seen from an event loop: no test waits for a clock, all wait for events."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from quantkit_serve.batch import Batch
from quantkit_serve.engine.loop import EngineService
from quantkit_serve.engine.stream import Stream
from quantkit_serve.refusal import Overloaded, Refused, Unavailable
from quantkit_serve.request import FinishReason, Grammar, Output, Request
from quantkit_serve.service import Service
from tests.serve.engine.fake import FakeRunner, alone, config, engine, request


def serve(
    test: Callable[[EngineService, FakeRunner], Coroutine[Any, Any, None]],
    step_limit_s: float = 100.0,
    give_up_s: float = 1000.0,
    **scheduler: int,
) -> None:
    async def run() -> None:
        core, runner = engine(config(**scheduler))
        service = EngineService(core, step_limit_s=step_limit_s, give_up_s=give_up_s)
        await service.start()
        try:
            await asyncio.wait_for(test(service, runner), 60)
        finally:
            await service.stop()
        assert core.pool.counts().used == core.pool.counts().quarantined == 0 or not service.health().is_alive

    asyncio.run(run())


async def collect(service: Service, one: Request) -> tuple[list[int], Output]:
    tokens: list[int] = []
    async for output in service.submit(one):
        tokens += output.token_ids
    return tokens, output


class Gate:
    """Holds the runner in the middle of a step."""

    def __init__(self, runner: FakeRunner) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        runner.before = self._wait

    def _wait(self, batch: Batch) -> None:
        self.entered.set()
        assert self.open.wait(60)

    async def until_entered(self) -> None:
        await asyncio.to_thread(self.entered.wait, 60)


def test_answers_come_out_and_are_not_crossed() -> None:
    async def test(service: EngineService, runner: FakeRunner) -> None:
        requests = [request(f"r{i}", [5 + i, 6], 12) for i in range(20)]
        answers = await asyncio.gather(*(collect(service, one) for one in requests))
        for one, (tokens, last) in zip(requests, answers, strict=True):
            assert tokens == alone(one)
            assert last.finish in (FinishReason.LENGTH, FinishReason.STOP)

    serve(test)


def test_refusals_are_raised_at_once() -> None:
    async def test(service: EngineService, runner: FakeRunner) -> None:
        gate = Gate(runner)
        with pytest.raises(Refused, match="ids are from 0"):
            service.submit(request("r", [1000]))
        running = service.submit(request("running", [5], 3))
        await gate.until_entered()
        with pytest.raises(Refused, match="in use"):
            service.submit(request("running", [5]))
        waiting = service.submit(request("waiting", [5], 3))
        with pytest.raises(Overloaded):
            service.submit(request("more", [5], 3))
        gate.open.set()
        for stream in (running, waiting):
            assert [o.finish is not None async for o in stream][-1]

    serve(test, max_num_seqs=1, max_waiting=1)


def test_an_abort_takes_effect_while_the_step_runs() -> None:
    async def test(service: EngineService, runner: FakeRunner) -> None:
        gate = Gate(runner)
        stream = service.submit(request("r", [5, 6, 7], 100, ignore_eos=True))
        other = asyncio.create_task(collect(service, request("other", [8], 5)))
        await gate.until_entered()
        service.abort("r")
        assert (await anext(stream)).finish is FinishReason.ABORT
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert service.figures().num_pages_quarantined > 0
        gate.open.set()
        assert (await other)[0] == alone(request("other", [8], 5))
        service.abort("r")
        service.abort("never there")

    serve(test)


@pytest.mark.parametrize("way", ["aclose", "drop", "never read"])
def test_a_caller_that_leaves_takes_its_request_along(way: str) -> None:
    async def test(service: EngineService, runner: FakeRunner) -> None:
        stream = service.submit(request("r", [5], 10**5, ignore_eos=True))
        if way != "never read":
            await anext(stream)
        if way == "aclose":
            await stream.aclose()  # type: ignore[attr-defined]
        del stream
        gc.collect()
        while service.figures().finished["abort"] == 0:
            await asyncio.sleep(0.001)
        assert service.figures().num_running == 0

    serve(test, pages=30_000)


def test_a_crash_ends_every_request_and_health_says_so() -> None:
    async def test(service: EngineService, runner: FakeRunner) -> None:
        gate = Gate(runner)
        streams = [service.submit(request(f"r{i}", [5 + i], 50)) for i in range(3)]
        await gate.until_entered()

        def crash(batch: Batch) -> None:
            raise RuntimeError("secret detail")

        runner.before = crash
        gate.open.set()
        for stream in streams:
            output = [output async for output in stream][-1]
            assert output.finish is FinishReason.ERROR
            assert "the engine has failed: RuntimeError" in (output.error or "")
            assert "secret" not in (output.error or "")
        health = service.health()
        assert not health.is_alive and not health.is_ok and "RuntimeError" in (health.reason or "")
        with pytest.raises(Unavailable):
            service.submit(request("late", [5]))

    serve(test)


def test_a_stuck_step_makes_it_unhealthy_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    async def test(service: EngineService, runner: FakeRunner) -> None:
        gate = Gate(runner)
        assert service.health().is_ok
        task = asyncio.create_task(collect(service, request("r", [5], 2)))
        await gate.until_entered()
        while not service.health().is_stuck or "stuck" not in caplog.text:
            await asyncio.sleep(0.005)
        assert service.health().is_alive and not service.health().is_ok
        runner.before = lambda batch: None
        gate.open.set()
        await task
        while not service.health().is_ok:
            await asyncio.sleep(0.005)

    serve(test, step_limit_s=0.05)


def test_a_step_that_stays_stuck_ends_the_engine_and_every_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def test(service: EngineService, runner: FakeRunner) -> None:
        gate = Gate(runner)
        tasks = [asyncio.create_task(collect(service, request(name, [5], 2))) for name in ("runs", "waits")]
        await gate.until_entered()
        for tokens, last in await asyncio.gather(*tasks):
            assert not tokens and last.finish is FinishReason.ERROR
            assert last.error is not None and "the engine was given up: a step has been running" in last.error
        assert not service.health().is_alive and "given up" in caplog.text
        with pytest.raises(Unavailable, match="given up"):
            service.submit(request("late", [5]))
        gate.open.set()  # too late
        await asyncio.sleep(0.05)
        assert not service.health().is_alive and not service.figures().num_running

    serve(test, step_limit_s=0.05, give_up_s=0.1)


def test_stop_lets_what_runs_finish() -> None:
    async def test(service: EngineService, runner: FakeRunner) -> None:
        gate = Gate(runner)
        one = request("r", [5], 20)
        task = asyncio.create_task(collect(service, one))
        await gate.until_entered()
        stopping = asyncio.create_task(service.stop(drain_s=60))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="shutting down"):
            service.submit(request("late", [5]))
        gate.open.set()
        assert (await task)[0] == alone(one)
        await stopping
        assert not service.health().is_alive

    serve(test)


def test_stop_without_patience_aborts() -> None:
    async def test(service: EngineService, runner: FakeRunner) -> None:
        task = asyncio.create_task(collect(service, request("r", [5], 10**5, ignore_eos=True)))
        while not service.figures().num_running:
            await asyncio.sleep(0.001)
        await service.stop()
        assert (await task)[1].finish is FinishReason.ABORT

    serve(test, pages=30_000)


def test_nothing_follows_the_last_output() -> None:
    async def run() -> None:
        left: list[str] = []
        stream = Stream(None, lambda: left.append("left"))
        stream.put(Output("r", text="a"))
        stream.put(Output("r", finish=FinishReason.ABORT))
        stream.put(Output("r", text="late", finish=FinishReason.LENGTH))
        assert [(o.text, o.finish) async for o in stream] == [("a", None), ("", FinishReason.ABORT)]
        await stream.aclose()
        del stream
        gc.collect()
        assert not left

    asyncio.run(run())


def test_an_abort_while_the_grammar_is_compiled_keeps_it_out_of_the_engine() -> None:
    async def run() -> None:
        core, _ = engine(compiler=SlowCompiler())
        service = EngineService(core)
        await service.start()
        stream = service.submit(request("r", [5], 5, grammar=Grammar("regex", "a")))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(SlowCompiler.entered.wait, 60)
        service.abort("r")
        SlowCompiler.open.set()
        assert (await first).finish is FinishReason.ABORT
        assert not core.has_work and service.figures().prompt_tokens == 0
        await service.stop()

    asyncio.run(asyncio.wait_for(run(), 60))


class SlowCompiler:
    entered, open = threading.Event(), threading.Event()

    def compile(self, grammar: Grammar) -> None:
        self.entered.set()
        assert self.open.wait(60)
