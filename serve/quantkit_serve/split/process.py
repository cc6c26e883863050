"""A worker's process as the engine's process sees it: start, ask, end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit import errors
from quantkit.errors import QuantkitError

from ..batch import Batch, ModelFacts
from ..phase import Phase
from .memory import SharedMemory
from .wire import Channel, Gone, Kind, TooLate, pack_batch, pack_json, unpack_done, unpack_json

# Not -m: that would put the current directory in front of everything that is imported.
_CODE = "import sys; sys.path[:] = sys.argv[1].split('\\n'); from quantkit_serve.split.worker import main; \
sys.exit(main(sys.argv[3:]))"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Opening:
    """What a worker is told to open: ``factory`` (``module:function``) gives a ``worker.Loaded``."""

    factory: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Identity:
    """What a worker has opened."""

    facts: ModelFacts
    pair_id: str | None


class WorkerFailed(Exception):
    """The process has ended, or was ended because it didn't answer in time; the text says what happened."""


class WorkerProcess:
    """One process, started by the constructor; it lives at most as long as the thread that called it.

    Args:
        phase: of its steps.
        opening: see there.
        num_threads: that it computes with.
        pool, logits: memory that it maps.

    Attributes:
        pid: of the process.
        has_pool: it was told the size of the pool.
        verdict: why it was ended; None: it wasn't.
    """

    def __init__(
        self, phase: Phase, opening: Opening, num_threads: int, pool: SharedMemory, logits: SharedMemory
    ) -> None:
        self.phase, self._opening, self.has_pool = phase, opening, False
        self.verdict: str | None = None
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        fds = (theirs.fileno(), pool.fd, logits.fd)
        path = "\n".join(sys.path)
        command = [sys.executable, "-c", _CODE, path, f"quantkit {phase.value} worker", *map(str, fds)]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(os.getpid())],
                pass_fds=fds,
                env=os.environ | dict.fromkeys(_THREADS, str(num_threads)),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what libraries print is talk; stdout is data
            )
        self.pid = self._process.pid

    def open(self, limit_s: float) -> Identity:
        """Wait until the model is loaded.

        Raises:
            QuantkitError: the worker says why it can't.
            WorkerFailed: it has died, or needs longer than ``limit_s``.
        """
        opening = {"factory": self._opening.factory, "arguments": dict(self._opening.arguments)}
        answer = unpack_json(
            self._ask(Kind.HELLO, (pack_json(opening),), Kind.READY, limit_s, "loading the model")
        )
        facts = answer["facts"]
        return Identity(
            ModelFacts(**facts | {"eos_token_ids": frozenset(facts["eos_token_ids"])}), answer["pair_id"]
        )

    def run(self, batch: Batch, num_pages: int, limit_s: float) -> int:
        """Compute a step; the rows of logits that it left in shared memory.

        Args:
            batch: of the step.
            num_pages: of the pool.
            limit_s: seconds that it may take.

        Raises:
            WorkerFailed: nothing writes to any page any more.
        """
        if not self.has_pool:
            self._send(Kind.POOL, (pack_json({"num_pages": num_pages}),), limit_s, "a step")
            self.has_pool = True
        answer = self._ask(Kind.RUN, tuple(pack_batch(batch)), Kind.DONE, limit_s, "a step")
        try:
            return unpack_done(answer)[0]
        except ValueError as error:
            raise self.condemn(f"sent {error}") from error

    def wait(self) -> str:
        """Until it has ended; why it has."""
        return self._why(self._process.wait())

    def kill(self) -> None:
        """Ended when this returns, and with it whatever it was writing."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Once nobody asks it any more."""
        self.kill()
        self._channel.close()

    def _ask(self, kind: Kind, parts: tuple[bytes, ...], wanted: Kind, limit_s: float, doing: str) -> bytearray:
        self._send(kind, parts, limit_s, doing)
        try:
            found, payload = self._channel.receive(limit_s)
        except (Gone, TooLate) as error:
            raise self._failed(error, limit_s, doing) from error
        except ValueError as error:
            raise self.condemn(f"sent {error}") from error
        if found is Kind.FAILED:
            raise self._said(unpack_json(payload))
        if found is not wanted:
            raise self.condemn(f"answered {kind.name} with {found.name}")
        return payload

    def _send(self, kind: Kind, parts: tuple[bytes, ...], limit_s: float, doing: str) -> None:
        try:
            self._channel.send(kind, *parts, limit_s=limit_s)
        except (Gone, TooLate) as error:
            raise self._failed(error, limit_s, doing) from error

    def condemn(self, reason: str) -> WorkerFailed:
        """End it; ``reason`` goes on from "the worker"."""
        self.verdict = f"the {self.phase.value} worker {reason}"
        self.kill()
        return WorkerFailed(self.verdict)

    def _failed(self, error: Gone | TooLate, limit_s: float, doing: str) -> WorkerFailed:
        if isinstance(error, TooLate):
            return self.condemn(f"was stuck in {doing} for more than {limit_s:g} s")
        try:  # its end of the socket is closed, so it is about to end
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return self.condemn("has closed its socket")
        return WorkerFailed(self._why(status))

    def _said(self, answer: dict[str, Any]) -> Exception:
        failed = self.condemn(f"failed: {answer['what']}")
        kind = getattr(errors, answer["class"] or "", None)
        if kind is None:
            return failed
        found: QuantkitError = kind(
            answer["what"], where=answer["where"], accepted=answer["accepted"], hint=answer["hint"]
        )
        return found

    def _why(self, status: int) -> str:
        if self.verdict is not None:
            return self.verdict
        if status >= 0:
            return f"the {self.phase.value} worker has ended with status {status}"
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"the {self.phase.value} worker was ended by {name}"
