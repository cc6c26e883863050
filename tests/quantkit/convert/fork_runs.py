"""Command lines run in forks of one warm process, which may be told to die at a given system call.

    python -m tests.quantkit.convert.fork_runs

Reads one JSON object per line: ``arguments``, ``kill`` (number of the disk-changing call at which SIGKILL strikes,
or null) and ``log`` (file that gets the calls of a run that lives, or null). Answers with two lines, the child's
pid and its exit status. A process of its own because forking needs a parent without threads, and warm because
importing huggingface_hub for each run would take a minute in all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.quantkit.convert.crash_driver import Calls

ROOT = Path(__file__).parents[3]
WARM = (
    "httpx", "huggingface_hub.file_download", "huggingface_hub.hf_api", "quantkit.artifact.attachments",
    "quantkit.cli.commands.convert", "quantkit.cli.show_plan", "quantkit.convert.run", "quantkit.plan.build",
    "quantkit.recipe.load", "rich.console", "tqdm",
)  # fmt: skip


class Log(Calls):
    """Calls by name and first path."""

    def __init__(self, fatal: int | None) -> None:
        self.seen: list[str] = []
        super().__init__(fatal)

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        inner = super()._wrap(name, real)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(f"{name} {args[0]}")
            return inner(*args, **kwargs)

        return call


class Forks:
    """The other side of the pipe."""

    def __init__(self, env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tests.quantkit.convert.fork_runs"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def start(self, *arguments: str | Path, kill: int | None = None, log: Path | None = None) -> int:
        """Begin a run; returns its pid."""
        assert self._process.stdin is not None
        order = {"arguments": [str(a) for a in arguments], "kill": kill, "log": str(log) if log else None}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def wait(self) -> int:
        """Exit status of the run; negative when a signal ended it."""
        return int(self._answer())

    def run(self, *arguments: str | Path, kill: int | None = None, log: Path | None = None) -> int:
        self.start(*arguments, kill=kill, log=log)
        return self.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        self._process.communicate(timeout=20)


def _child(order: dict[str, Any]) -> int:
    from quantkit.cli.main import main as program

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the pipe is for answers
    calls = Log(order["kill"])
    code = program([*order["arguments"], "-q"])
    if order["log"] is not None:
        with open(order["log"], "w", encoding="utf-8") as handle:
            handle.write("\n".join(calls.seen))
    return code


def main() -> None:
    import quantkit.checkpoint.hub as hub
    import quantkit.convert.executor as executor
    import quantkit.convert.shards as shards
    import quantkit_kernels
    from tests.quantkit.checkpoint.hub_case import QUICK

    quantkit_kernels.backend()
    for name in WARM:
        import_module(name)
    # Many units and journal lines, resumable downloads and short waits, so that a small model has the states of a
    # large one.
    shards.FLUSH_BYTES, executor.BATCH_BYTES = 96 << 10, 64 << 10
    hub.download.__globals__["SMALL"] = 1 << 10
    hub.Retry = lambda: QUICK  # type: ignore[assignment, misc]
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = _child(order)
            finally:
                os._exit(code)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
