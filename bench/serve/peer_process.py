"""A peer in a process of its own, driven line by line so that it takes turns with us in one run.

Both sides are here: ``answer`` is the loop inside the peer's process (which may run another Python, so this file
imports nothing but the standard library), ``Peer`` what the bench holds. A line asks for a load, a line that
begins with ``MARK`` answers: libraries print to stdout, too.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

MARK = "PEER "
VOCAB, SPECIAL = 4096, 16  # of the bundled tokenizer; ids below are special
STOP_S = 20.0

Generate = Callable[[list[list[int]], int], int]  # prompts, tokens of an answer -> tokens of all answers


def answer(generate: Generate) -> None:
    """Inside the peer: say that it is ready, then run a load for each line of stdin."""
    print(f"{MARK}{{}}", flush=True)
    for line in sys.stdin:
        load = json.loads(line)
        rng = random.Random(load["seed"])
        prompts = [[rng.randrange(SPECIAL, VOCAB) for _ in range(load["input_len"])] for _ in range(load["count"])]
        start = time.perf_counter()
        tokens = generate(prompts, load["output_len"])
        seconds = time.perf_counter() - start
        print(f"{MARK}{json.dumps({'tokens': tokens, 'seconds': seconds})}", flush=True)


class Peer:
    """A process that runs ``answer``; use it as a context manager.

    Raises:
        RuntimeError: it ends, or does less than asked.
    """

    def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            env=os.environ | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that its own helpers end with it
        )
        self._read()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def rate(self, count: int, input_len: int, output_len: int, seed: int) -> float:
        """Output tokens per second."""
        load = {"count": count, "input_len": input_len, "output_len": output_len, "seed": seed}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(load) + "\n")
        self._process.stdin.flush()
        found = self._read()
        if found["tokens"] != count * output_len:
            raise RuntimeError(f"{found['tokens']} tokens instead of {count} x {output_len}")
        return found["tokens"] / found["seconds"]

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                found: dict[str, float] = json.loads(line.removeprefix(MARK))
                return found
        raise RuntimeError(f"the peer ended with {self._process.wait()}; its stderr says why")
