"""Run a command and measure the whole process tree: wall time and peak memory as summed PSS.

PSS (proportional set size) divides shared pages among the processes that map them, so a sum over the tree
counts each page once; resident size would count torch's libraries once per worker. It is sampled from
``/proc/PID/smaps_rollup``, so a peak shorter than the interval can be missed; the kernel's own high-water
mark of the largest process (``ru_maxrss``) is returned beside it as a cross-check. File-backed pages that
are merely cached (written output) are not part of PSS and not counted: the kernel can drop them.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Measured:
    """One run: seconds, bytes, exit code and the captured standard output and error."""

    wall_s: float
    peak_pss_bytes: int
    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's JSON: our figure, the peer's in the same run, the target and whether it holds."""

    name: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    target: str | None = None
    holds: bool | None = None


def write_rows(rows: list[Row], path: str | None) -> None:
    """Print the rows as a table and write them as JSON when a path is given."""
    for row in rows:
        peer = f"  {row.peer}: {row.peer_value:,.4g}" if row.peer and row.peer_value is not None else ""
        verdict = {True: "  holds", False: "  MISSED", None: ""}[row.holds]
        target = f"  target {row.target}" if row.target else ""
        print(f"{row.name:58s} {row.value:>16,.6g} {row.unit:10s}{peer}{target}{verdict}")
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")


def markdown(title: str, rows: list[Row]) -> str:
    """The rows as a table with a heading."""
    lines = [f"## {title}", "", "| what | figure | beside | target | |", "|---|---|---|---|---|"]
    for row in rows:
        peer = f"{row.peer}: {row.peer_value:,.4g}" if row.peer and row.peer_value is not None else ""
        verdict = {True: "holds", False: "**missed**", None: ""}[row.holds]
        lines.append(f"| {row.name} | {row.value:,.4g} {row.unit} | {peer} | {row.target or ''} | {verdict} |")
    return "\n".join([*lines, ""])


def _pss_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as f:
            for line in f:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass  # the process ended between listing and reading
    return 0


def _tree_pss_bytes(root: psutil.Process) -> int:
    try:
        pids = [root.pid, *(c.pid for c in root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0
    return sum(_pss_bytes(p) for p in pids)


def run_measured(
    command: list[str], *, env: dict[str, str] | None = None, cwd: str | None = None, interval_s: float = 0.02
) -> Measured:
    """Run ``command`` to its end and return what it took."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    root, peak = psutil.Process(process.pid), 0
    out: list[str] = ["", ""]

    def drain() -> None:
        out[0], out[1] = process.communicate()

    import threading

    reader = threading.Thread(target=drain)
    reader.start()
    while reader.is_alive():
        peak = max(peak, _tree_pss_bytes(root))
        reader.join(interval_s)
    return Measured(time.perf_counter() - start, peak, process.returncode, out[0], out[1])
