"""A worker: one process that has a model, maps the page pool, and computes the steps it is sent, one at a time.

Started by ``process.WorkerProcess`` with its descriptors on the command line and its thread budget in the
environment, which torch reads when it is imported, here not before the model is opened. It ends when its socket
does, and the kernel ends it when the thread that started it has ended, so it can't outlive the engine. Signals
of a terminal or a service manager are the engine's business, which may want to drain.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from quantkit.errors import QuantkitError

from ..batch import Batch, ModelFacts
from .memory import SharedMemory
from .wire import Channel, Gone, Kind, pack_done, pack_json, unpack_batch, unpack_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class WorkerRunner(Protocol):
    """``batch.Runner`` over memory that it is given, in arrays instead of tensors."""

    facts: ModelFacts

    def allocate(self, memory: NDArray[np.uint8]) -> None:
        """uint8 ``[num_pages, page_bytes]``, once, before the first step."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Float32 ``[n, vocab]``."""


class Loaded(NamedTuple):
    """What a worker works with; ``pair_id`` of the artifact, None of a plain checkpoint."""

    runner: WorkerRunner
    pair_id: str | None


class Arguments(NamedTuple):
    """What the command line has: descriptors, and who is to be outlived by nobody."""

    socket_fd: int
    pool_fd: int
    logits_fd: int
    parent: int


def main(args: list[str]) -> int:
    """Exit status: 0 when the engine has closed the socket, 1 after an error, which was sent."""
    arguments = Arguments(*map(int, args))
    _die_with(arguments.parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=arguments.socket_fd))
    try:
        _Worker(channel, SharedMemory(arguments.pool_fd), SharedMemory(arguments.logits_fd)).serve()
    except Gone:
        return 0
    except Exception as error:
        if not isinstance(error, QuantkitError):  # which the engine reports
            traceback.print_exc()
        channel.send(Kind.FAILED, pack_json(describe(error)))
        return 1
    return 0  # pragma: no cover  (serve ends by an exception only)


def describe(error: Exception) -> dict[str, Any]:
    """For the engine; ``process`` makes an error of it again."""
    if isinstance(error, QuantkitError):
        parts = {"what": error.what, "where": error.where, "accepted": error.accepted, "hint": error.hint}
        return {"class": type(error).__name__, **parts}
    return {"class": None, "what": f"{type(error).__name__}: {error}"}


class _Worker:
    def __init__(self, channel: Channel, pool: SharedMemory, logits: SharedMemory) -> None:
        self._channel, self._pool, self._logits = channel, pool, logits

    def serve(self) -> None:
        """Until the engine has gone (``Gone``) or something goes wrong."""
        kind, payload = self._channel.receive()
        if kind is not Kind.HELLO:
            raise ValueError(f"{kind.name} before HELLO")
        runner, pair_id = _open(**unpack_json(payload))
        facts = asdict(runner.facts) | {"eos_token_ids": sorted(runner.facts.eos_token_ids)}
        self._channel.send(Kind.READY, pack_json({"facts": facts, "pair_id": pair_id}))
        while True:
            kind, payload = self._channel.receive()
            if kind is Kind.POOL:
                num_pages = int(unpack_json(payload)["num_pages"])
                memory = self._pool.map(num_pages * runner.facts.page_bytes)
                runner.allocate(memory.reshape(num_pages, runner.facts.page_bytes))
            elif kind is Kind.RUN:
                self._run(runner, unpack_batch(payload))
            else:
                raise ValueError(f"{kind.name} is nothing to send to a worker")

    def _run(self, runner: WorkerRunner, batch: Batch) -> None:
        start = time.perf_counter()
        logits = runner.run(batch)
        if len(logits):
            goal = self._logits.map(logits.nbytes)[: logits.nbytes].view(np.float32)
            np.copyto(goal.reshape(logits.shape), logits)
        self._channel.send(Kind.DONE, pack_done(len(logits), time.perf_counter() - start))


def _open(factory: str, arguments: dict[str, Any]) -> Loaded:
    """``factory`` is ``module:function``; another one than ``load:open_model`` in tests only."""
    module, _, function = factory.partition(":")
    loaded = getattr(importlib.import_module(module), function)(**arguments)
    return Loaded(*loaded)


def _die_with(parent: int) -> None:
    """Of the thread that started this process, which lives as long as the engine wants its worker."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has died already
        sys.exit(0)
