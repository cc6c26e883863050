"""The engine at work: its steps in a thread per lane, answers in an event loop (``service.Service``).

Requests enter and leave under the engine's lock, which is free while the model computes, so an abort takes effect
at once. What a step gives is handed to the event loop in one call. If a step raises, the engine is dead: every
request ends with an error, new ones are refused, ``health`` says why; a step that takes longer than it may makes
it unhealthy as long as it lasts. If it lasts still longer, the engine is given up as if it had failed: nobody is
left to wait for an answer that won't come. Restarting is the business of whoever started the process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..phase import Phase
from ..refusal import Refused, Unavailable
from ..request import FinishReason, Output, Request
from ..service import Figures, Health
from .engine import Engine
from .stream import Stream

STEP_LIMIT_S = 120.0
GIVE_UP_S = 600.0
LOCK_S = 1.0  # nobody holds the lock for so long, but a step that is stuck with it
JOIN_S = 10.0  # for a thread to end; it is a daemon, so a stuck one doesn't keep the process
STALLED_S = 0.25  # between two looks of a lane that has nothing to do while requests are there: deadlines

_log = logging.getLogger(__name__)


class EngineService:
    """See ``Service``; its methods are called from the event loop that ``start`` ran in.

    Args:
        engine: nobody else calls its ``step``.
        step_limit_s: seconds after which a step counts as stuck.
        give_up_s: seconds after which it is waited for no longer.
    """

    def __init__(
        self, engine: Engine, *, step_limit_s: float = STEP_LIMIT_S, give_up_s: float = GIVE_UP_S
    ) -> None:
        self.facts, self.config = engine.facts, engine.config
        self._engine, self._step_limit_s, self._give_up_s = engine, step_limit_s, give_up_s
        self._changed = engine.changed
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"engine {lane}", daemon=True)
            for lane in engine.lanes
        ]
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar")  # leaves the cores to the engine
        # weak: a stream that its caller has dropped must go, and take its request with it
        self._streams: weakref.WeakValueDictionary[str, Stream] = weakref.WeakValueDictionary()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.Task[None] | None = None
        self._step_starts: dict[Phase | None, float | None] = dict.fromkeys(engine.lanes)
        self._is_draining = self._is_stopping = False
        self._death: str | None = "the engine has not been started"

    # -- Service

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._death = None
        for thread in self._threads:
            thread.start()
        self._watch = asyncio.create_task(self._watch_steps())

    async def stop(self, *, drain_s: float = 0.0) -> None:
        self._is_draining = True
        end = time.monotonic() + drain_s
        while any(not s.has_last for s in self._streams.values()) and time.monotonic() < end:
            await asyncio.sleep(min(0.02, drain_s))
        for request_id in list(self._streams):
            self.abort(request_id)
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.to_thread(self._end)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._death = self._death or "the engine has been stopped"

    def submit(self, request: Request) -> AsyncIterator[Output]:
        """As ``Service.submit``; a grammar is compiled before the first output and may be refused there.

        Raises:
            Refused: see ``Engine.add``; ``Unavailable``: the engine is dead or about to stop.
        """
        name = request.request_id
        self._check_open()  # first, as a step that is stuck may have the lock
        with self._changed:
            self._check_open()
            if name in self._streams:
                raise Refused(f"request_id {name!r} is in use", param="request_id")
            if request.params.grammar is not None:
                self._engine.check(request)
                stream = Stream(lambda: self._compile(request), lambda: self._drop(name))
            else:
                self._engine.add(request)
                self._changed.notify_all()
                stream = Stream(None, lambda: self._drop(name))
            self._streams[name] = stream
            return stream

    def abort(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        output = self._engine.abort(request_id)
        if stream is not None:  # if it isn't in the engine, it has ended, or its grammar is being compiled
            stream.put(output or Output(request_id, finish=FinishReason.ABORT))

    def health(self) -> Health:
        if self._death is not None:
            return Health(is_alive=False, reason=self._death)
        if (seconds := self._step_s()) > self._step_limit_s:
            return Health(is_alive=True, is_stuck=True, reason=f"a step has been running for {seconds:.0f} s")
        outage = self._engine.outage()
        return Health(is_alive=True, is_degraded=outage is not None, reason=outage)

    def figures(self) -> Figures:
        return self._engine.figures()

    # -- in the event loop

    def _check_open(self) -> None:
        if self._death is not None:
            raise Unavailable(self._death)
        if self._is_draining:
            raise Unavailable("the server is shutting down")

    async def _compile(self, request: Request) -> None:
        grammar = request.params.grammar
        assert grammar is not None and self._loop is not None
        matcher = await self._loop.run_in_executor(self._compiling, self._engine.compile, grammar)
        stream = self._streams.get(request.request_id)
        if stream is None or stream.has_last:  # aborted meanwhile
            return
        with self._changed:
            self._check_open()
            self._engine.add(request, matcher)
            self._changed.notify_all()

    def _drop(self, request_id: str) -> None:
        """The caller has gone. Not at once: the collector may run while this very thread is changing the
        engine."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._engine.abort, request_id)

    def _deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put(output)

    def _step_s(self) -> float:
        """How long the longest step has been running."""
        now = time.monotonic()
        return max(0.0 if start is None else now - start for start in self._step_starts.values())

    async def _watch_steps(self) -> None:
        """One line in the log when a step gets stuck, one when it is over, or the end of the engine."""
        was_stuck = False
        while True:
            await asyncio.sleep(min(1.0, self._step_limit_s))
            health = self.health()
            if health.is_stuck and not was_stuck:
                _log.error("the engine is stuck: %s", health.reason)
            elif was_stuck and not health.is_stuck:
                _log.warning("the engine is no longer stuck")
            was_stuck = health.is_stuck
            if (seconds := self._step_s()) > self._give_up_s:
                self._give_up(f"the engine was given up: a step has been running for {seconds:.0f} s")
                return

    def _give_up(self, reason: str) -> None:
        _log.critical("%s", reason)
        self._death = reason
        if self._engine.lock.acquire(timeout=LOCK_S):
            try:
                self._engine.fail_all(reason)
                self._changed.notify_all()
            finally:
                self._engine.lock.release()
        for name, stream in list(self._streams.items()):  # also those whose grammar is being compiled
            stream.put(Output(name, finish=FinishReason.ERROR, error=reason))

    def _end(self) -> None:
        self._engine.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(JOIN_S)

    # -- in the engine's threads

    def _run(self, lane: Phase | None) -> None:
        try:
            while self._wait(lane):
                self._step_starts[lane] = time.monotonic()
                self._engine.step(lane, self._hand_over)
                self._step_starts[lane] = None
        except BaseException as error:
            self._die(error)

    def _wait(self, lane: Phase | None) -> bool:
        """Until there may be something to do; False: to stop."""
        with self._changed:
            while not (self._is_over or self._engine.is_due(lane)):
                if not self._changed.wait(STALLED_S if self._engine.has_work else None):
                    break
            return not self._is_over

    @property
    def _is_over(self) -> bool:
        return self._is_stopping or self._death is not None

    def _die(self, error: BaseException) -> None:
        _log.critical("the engine has failed", exc_info=error)
        with self._changed:
            self._changed.notify_all()
            self._step_starts = dict.fromkeys(self._engine.lanes)
            self._death = f"the engine has failed: {type(error).__name__}"
            outputs = self._engine.fail_all(f"{self._death}; the log of the server says more")
        self._hand_over(outputs)

    def _hand_over(self, outputs: Sequence[Output]) -> None:
        if outputs and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, outputs)
