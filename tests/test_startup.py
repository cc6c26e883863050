"""What starting the program costs: `quantkit --help` loads none of the big packages."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

BIG = ("torch", "numpy", "pydantic", "huggingface_hub", "rich", "yaml", "transformers", "safetensors")
HELP = (
    "plan", "convert", "verify", "inspect", "diff", "fidelity", "serve", "generate", "report", "bench", "recipes",
    "env", "completion",
)  # fmt: skip


def loaded(code: str) -> list[str]:
    script = f"import sys\n{code}\nprint('LOADED', *[m for m in {BIG!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.rpartition("LOADED")[2].split()


def test_import_costs_nothing() -> None:
    assert loaded("import quantkit; dir(quantkit); quantkit.errors") == []


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], [], *([name, "--help"] for name in HELP), ["bench", "serve", "--help"]],
    ids=str,
)
def test_help_pages_load_nothing_big(arguments: list[str]) -> None:
    assert loaded(f"from quantkit.cli.main import main\nmain({arguments!r})") == []


def test_help_is_quick() -> None:
    # The goal is 0.3 s; a shared machine gets three tries and a margin. bench measures the figure itself.
    best = 10.0
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "quantkit", "--help"], check=True, stdout=subprocess.DEVNULL)
        best = min(best, time.perf_counter() - start)
    assert best < 1.0
