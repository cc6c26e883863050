"""Compiles in a process of its own: this one has Triton's interpreter, whose kernels can't be compiled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from quantkit_kernels.forward.triton import kernels

ROOT = Path(__file__).resolve().parents[3]
Row = dict[str, Any]


def compile_for(arch: int, to: Path, *options: str) -> list[Row]:
    """What ``tools.kernel_resources`` found."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-m", "tools.kernel_resources", "--arch", str(arch), "--json", str(to), *options]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows: list[Row] = json.loads(to.read_text(encoding="utf-8"))
    return rows


def kernel_names() -> set[str]:
    """All of the package, from its sources."""
    sources = [path.read_text(encoding="utf-8") for path in Path(kernels.__path__[0]).glob("*.py")]
    return {name for source in sources for name in re.findall(r"^@triton\.jit\ndef (\w+_kernel)\(", source, re.M)}
