"""A virtual environment for the named peers, apart from quantkit's: llm-compressor pins and imports its own.

``peer_python()`` returns its interpreter and creates the environment (.venv-peer) on the first call.
QUANTKIT_PEER_PYTHON names another interpreter that already has llmcompressor.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [
    "torch==2.13.0",
    "llmcompressor==0.14.0.1",
    "click",
    "httpx",
    "pydantic",
    "pyyaml",
    "rich",
]  # and what quantkit needs


def peer_python() -> str:
    """Path of a Python that can ``import llmcompressor``."""
    if named := os.environ.get("QUANTKIT_PEER_PYTHON"):
        return named
    venv = ROOT / ".venv-peer"
    python, ready = venv / "bin" / "python", venv / ".ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        ready.touch()
    return str(python)
