"""Runs conversions that die, each in a forked child, and prints what resuming them gave.

    python -m tests.quantkit.convert.crash_driver SOURCE FOLDER SEED POINTS DELAYS [OPTIONS]

First an undisturbed run, with every system call that writes counted. Then ``POINTS`` runs that kill themselves
with SIGKILL at a call drawn by SEED (pwrite, write, fsync, fdatasync, rename: before it or half-way through it),
and ``DELAYS`` runs killed from outside after a random delay; each is run again until it ends. Prints JSON: a list
of [what happened, number of kills, core digests]. OPTIONS is JSON, for the recipe.

A process of its own because forking needs a parent without threads.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import quantkit.convert.executor as executor
import quantkit.convert.shards as shards
from tests.quantkit.convert.cases import core_digests
from tests.quantkit.convert.cases import run as convert

CALLS = ("pwrite", "write", "fsync", "fdatasync", "replace", "rename", "link", "unlink")


class Calls:
    """Counts the calls that change the disk; at number ``fatal`` the process dies."""

    def __init__(self, fatal: int | None) -> None:
        self.count, self.fatal = 0, fatal
        for name in CALLS:
            setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.fatal:
                if name in ("pwrite", "write") and len(args[1]) > 1:  # a torn write
                    real(args[0], memoryview(args[1])[: len(args[1]) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call


def in_child(work: Callable[[], None], kill_after: float | None = None) -> int:
    """Exit status of ``work`` in a fork: 0 done, negative killed."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as problem:
            print(repr(problem), file=sys.stderr, flush=True)
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    source, folder, seed, points, delays = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:6])
    run = partial(convert, **json.loads(sys.argv[6] if len(sys.argv) > 6 else "{}"))
    # Many small units and journal lines, so that a small model has the states of a large one.
    shards.FLUSH_BYTES, executor.BATCH_BYTES = 48 << 10, 24 << 10
    counted = folder / "calls"

    def whole(out: Path) -> None:
        calls = Calls(None)
        run(source, out, jobs=2)
        counted.write_text(str(calls.count))

    started = time.monotonic()
    assert in_child(lambda: whole(folder / "whole")) == 0
    lasted = time.monotonic() - started
    total = int(counted.read_text())
    random_ = random.Random(seed)
    results: list[Any] = [["undisturbed", 0, core_digests(folder / "whole")]]
    for number in range(points + delays):
        out = folder / f"run-{number}"
        kills = 0

        def fatal(out: Path = out) -> None:
            Calls(random_.randrange(1, total))
            run(source, out, jobs=random_.choice((1, 2, 4)))

        while True:
            delay = random_.uniform(0, lasted) if number >= points else None
            status = in_child(fatal if number < points and kills < 3 else lambda out=out: run(source, out), delay)
            random_.random()  # the child drew from its copy: move on, so that the next one draws otherwise
            if status != 0 and status != -signal.SIGKILL:
                raise SystemExit(f"run {number} ended with {status}")
            if status == 0 or (out.exists() and delay is not None):
                break
            kills += 1
            if delay is not None and kills == 3:
                assert in_child(lambda out=out: run(source, out)) == 0
                break
        leftover = out.with_name(out.name + ".partial").exists()
        results.append([f"run {number}, partial left: {leftover}", kills, core_digests(out)])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
