"""Running the program: in this process, and as a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from quantkit.cli.lazy import Command, LazyGroup
from quantkit.cli.main import cli, main


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


def all_commands(group: LazyGroup = cli, path: str = "") -> dict[str, Command | LazyGroup]:
    """Every command and group by what is typed after ``quantkit``."""
    found: dict[str, Command | LazyGroup] = {}
    for name in group.lazy:
        command = group.get_command(click.Context(group), name)
        assert isinstance(command, Command | LazyGroup)
        found[path + name] = command
        if isinstance(command, LazyGroup):
            found |= all_commands(command, f"{path}{name} ")
    return found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run one command line in this process; no terminal."""

    def call(*arguments: str | Path) -> Result:
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        return Result(code, *capsys.readouterr())

    return call


def environment(**extra: str) -> dict[str, str]:
    """A subprocess's environment: ours without what changes output, one thread, no network."""
    drop = ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "QUANTKIT_KERNELS", "COLUMNS")
    clean = {k: v for k, v in os.environ.items() if k not in drop}
    return {**clean, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "xterm-256color", **extra}


def process(*arguments: str | Path, cwd: Path | None = None, **extra: str) -> Result:
    """Run the program as a process of its own."""
    command = [sys.executable, "-m", "quantkit", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(**extra), cwd=cwd, timeout=120)
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-glm converted once, by the library."""
    import quantkit

    target = tmp_path_factory.mktemp("cli") / "tiny-glm-w4"
    quantkit.convert(quantkit.plan("tiny-glm", method="rtn"), target).close()
    return target
