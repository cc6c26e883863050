"""Memory of a calibrated conversion at GLM-5.2's layer shapes, and what an interruption costs.

    python bench/bench_calibrated.py [--json FILE] [--work DIR] [--samples 32] [--skip memory|interrupt]

Memory: peak PSS over the whole process tree of `quantkit convert --method gptq --max-memory 3GiB`, for one MoE
layer of 16 experts, and again for more experts and more layers: neither may show. Two of the 16 experts are
active per token, so that an expert sees an eighth of all tokens. The samples are long enough for hidden states to
be larger than the share of the memory that they get, so they lie in mapped files.

Interruption: the conversion is killed (SIGKILL) when the journal holds half of the layer's experts, and resumed.
What the two runs took beyond an undisturbed one is start-up, one pass of the layer's attention and the experts
that were in work; it is shown beside the time of one expert. The journal tells how many experts the second run
calibrated: exactly those that it did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from make_checkpoint import write
from measure import Measured, Row, run_measured, write_rows

GIB, MIB = 2**30, 2**20
LIMIT = "3GiB"
MAX_GROWTH = 1.10
CASES = (("1 layer, 16 experts", 1, 16), ("1 layer, 32 experts", 1, 32), ("2 layers, 16 experts", 2, 16))
LENGTH = 256
WORKERS = 2


def command(source: Path, out: Path, samples: int, *more: str) -> list[str]:
    """The conversion, into a fresh directory unless it is to be resumed."""
    fixed = ["--method", "gptq", "--prefill", "link", "-q", "-j", str(WORKERS)]
    data = ["--samples", str(samples), "--length", str(LENGTH)]
    return [sys.executable, "-m", "quantkit", "convert", str(source), *fixed, *data, *more, "-o", str(out)]


def make_source(work: Path, moe_layers: int, experts: int) -> Path:
    source = work / f"glm-{moe_layers}-{experts}"
    write(
        source, moe_layers=moe_layers, experts=experts, shard_bytes=GIB, tokenizer=True,
        active=max(1, experts // 8),
    )  # fmt: skip
    return source


def checked(run: Measured) -> Measured:
    """The run, or an error with its output if it failed."""
    if run.returncode:
        raise SystemExit(f"a measured command failed with {run.returncode}:\n{run.stdout}\n{run.stderr}")
    return run


def memory_rows(work: Path, samples: int) -> list[Row]:
    rows, peaks = [], {}
    for label, moe_layers, experts in CASES:
        source, out = make_source(work, moe_layers, experts), work / "out"
        run = checked(run_measured(command(source, out, samples, "--max-memory", LIMIT)))
        peaks[label] = run.peak_pss_bytes / MIB
        holds = peaks[label] <= 3 * GIB / MIB
        rows.append(Row(f"gptq peak PSS, {label}", peaks[label], "MiB", target=f"<= {LIMIT}", holds=holds))
        rows.append(Row(f"gptq wall, {label}", run.wall_s, "s"))
        for tree in (source, out):
            shutil.rmtree(tree, ignore_errors=True)
    base, *others = peaks.values()
    for (label, *_), peak in zip(CASES[1:], others, strict=True):
        growth = peak / base
        holds = growth <= MAX_GROWTH
        rows.append(Row(f"gptq peak PSS growth, {label}", growth, "x", target=f"<= {MAX_GROWTH}", holds=holds))
    return rows


def experts_done(journal: Path) -> int:
    """Experts whose three weights are durable."""
    weights = 0
    for line in journal.read_bytes().splitlines() if journal.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:  # being written
            continue
        if entry["kind"] in ("jobs", "shard"):
            weights += sum(len(job) > 3 for job in entry["done"])  # the facts of calibration stand fourth
    return weights // 3


def interrupt_rows(work: Path, samples: int) -> list[Row]:
    experts = 16
    source = make_source(work, 1, experts)
    whole = checked(run_measured(command(source, work / "whole", samples))).wall_s
    out = work / "killed"
    journal = Path(f"{out}.partial") / "journal.jsonl"
    start = time.perf_counter()
    process = subprocess.Popen(command(source, out, samples), start_new_session=True)
    while process.poll() is None and experts_done(journal) < experts // 2:
        time.sleep(0.02)
    if process.poll() is not None:
        raise SystemExit(f"the conversion ended with {process.returncode} before it could be killed")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    first = time.perf_counter() - start
    held = experts_done(journal)
    second = checked(run_measured(command(source, out, samples))).wall_s
    extra = first + second - whole
    same = (out / "manifest.json").read_bytes() == (work / "whole" / "manifest.json").read_bytes()
    idle = checked(run_measured([*command(source, work / "idle", samples), "--layers", "0", "--dry-run"])).wall_s
    for tree in (source, out, work / "whole"):
        shutil.rmtree(tree, ignore_errors=True)
    return [
        Row("interrupt: undisturbed run", whole, "s"),
        Row("interrupt: experts in the journal when killed", held, f"of {experts}"),
        Row("interrupt: both runs beyond the undisturbed one", extra, "s"),
        Row("interrupt: of that, start-up of a command", idle, "s"),
        Row("interrupt: same bytes", float(same), "yes = 1", target="1", holds=same),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--work", type=Path, help="directory for sources and outputs (needs 8 GiB)")
    parser.add_argument("--samples", type=int, default=32, help=f"calibration samples of {LENGTH} tokens")
    parser.add_argument("--skip", choices=["memory", "interrupt"], action="append", default=[])
    a = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=a.work) as work:
        if "memory" not in a.skip:
            rows += memory_rows(Path(work), a.samples)
        if "interrupt" not in a.skip:
            rows += interrupt_rows(Path(work), a.samples)
    write_rows(rows, a.json)


if __name__ == "__main__":
    main()
