"""Figure 2: `quantkit convert --method rtn` against llm-compressor's model_free_ptq, time and memory.

    python bench/bench_convert.py [--json FILE] [--work DIR] [--rounds 3] [--group-size 32]

Speed: the same GLM-5.2-shaped source (real layer shapes, four MoE layers of 24 experts, 4.2 GiB),
the same group size, the same two workers, in turn A B A B in one run; medians are compared. Ours does more
work than the peer: it hashes every source and output byte, fsyncs, and writes a prefill view, here by
hard link (`--prefill link`) because the peer writes none. Beside both, on the same disk: `cp` and `sync` of the
files that ours wrote, read from the page cache.

Memory: peak PSS over the whole process tree, for 1 to 4 GiB of source and for shards of 0.25 to 2 GiB.

Physical limit reported beside it: the time to read the source once and write the output once with plain
`read`/`write` calls and to hash both once with SHA-256, on one core, in the same run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from make_checkpoint import write
from measure import Measured, Row, run_measured, write_rows
from peer_env import peer_python

GIB, MIB = 2**30, 2**20
HERE = Path(__file__).resolve().parent


def ours(source: Path, out: Path, group_size: int) -> Measured:
    """One conversion by quantkit into a fresh directory."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(f"{out}.partial", ignore_errors=True)
    command = [sys.executable, "-m", "quantkit", "convert", str(source), "--w4", "--method", "rtn"]
    command += ["--group-size", str(group_size), "--prefill", "link", "-j", "2", "-q", "-o", str(out)]
    return checked(run_measured(command))


def peer(source: Path, out: Path, group_size: int) -> Measured:
    """One conversion by llm-compressor into a fresh directory."""
    shutil.rmtree(out, ignore_errors=True)
    command = [peer_python(), str(HERE / "peer_model_free_ptq.py"), str(source), str(out), str(group_size), "2"]
    return checked(run_measured(command))


def checked(run: Measured) -> Measured:
    """The run, or an error with its output if it failed: a failed run is not a fast one."""
    if run.returncode:
        raise SystemExit(f"a measured command failed with {run.returncode}:\n{run.stdout}\n{run.stderr}")
    return run


def limit_s(source: Path, out: Path) -> float:
    """Seconds to read the source and write the decode view once, hashing both, with nothing else to do."""
    start = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=out.parent) as sink:
        for tree, copy in ((source, False), (out / "decode", True)):
            for path in sorted(tree.glob("*.safetensors")):
                digest = hashlib.sha256()
                with open(path, "rb", buffering=0) as f:
                    while block := f.read(8 * MIB):
                        digest.update(block)
                        if copy:
                            sink.write(block)
        sink.flush()
        os.fsync(sink.fileno())
    return time.perf_counter() - start


def copy_s(tree: Path, to: Path) -> float:
    """Seconds of `cp` and `sync` of a directory whose files are in the page cache."""
    for path in tree.rglob("*"):
        if path.is_file():
            with open(path, "rb") as handle:
                while handle.read(8 * MIB):
                    pass
    os.sync()
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(tree), str(to)], check=True)
    os.sync()
    seconds = time.perf_counter() - start
    shutil.rmtree(to)
    return seconds


def speed_rows(work: Path, group_size: int, rounds: int) -> list[Row]:
    source = work / "glm-4g"
    total = write(source, moe_layers=4, experts=24, shard_bytes=GIB // 2)
    a, b, copies = [], [], []
    ours(source, work / "ours", group_size)  # warms the page cache for both
    for _ in range(rounds):
        a.append(ours(source, work / "ours", group_size))
        copies.append(copy_s(work / "ours" / "decode", work / "copy"))
        b.append(peer(source, work / "peer", group_size))
    share = statistics.median(copies) / statistics.median(r.wall_s for r in a)
    ta, tb = (statistics.median(r.wall_s for r in x) for x in (a, b))
    ma, mb = (max(r.peak_pss_bytes for r in x) / MIB for x in (a, b))
    name = "llm-compressor model_free_ptq"
    rows = [
        Row("convert rtn, source", total / GIB, "GiB"),
        Row("convert rtn, wall", ta, "s", name, tb),
        Row("convert rtn, speed-up over peer", tb / ta, "x", name, 1.0, ">= 20", tb / ta >= 20),
        Row("cp and sync of what convert rtn wrote, wall", statistics.median(copies), "s"),
        Row("convert rtn, of the speed of cp and sync", share, "x", "cp + sync", 1.0, ">= 0.4", share >= 0.4),
        Row("convert rtn, peak PSS", ma, "MiB", name, mb, "<= 900", ma <= 900),
        Row("convert rtn, read+hash+write+hash once, one core", limit_s(source, work / "ours"), "s"),
    ]
    for tree in (source, work / "ours", work / "peer"):
        shutil.rmtree(tree, ignore_errors=True)
    return rows


CASES = (  # label, MoE layers, GiB of a shard
    ("1 GiB source", 1, 0.5),
    ("4 GiB source", 4, 0.5),
    ("0.25 GiB shards", 3, 0.25),
    ("2 GiB shards", 3, 2.0),
)
MAX_PSS_MIB, MAX_GROWTH = 900, 1.10


def memory_rows(work: Path, group_size: int, rounds: int) -> list[Row]:
    """Highest peak of several rounds for each case: a sampled peak can miss, never exceed."""
    rows, peaks = [], {}
    for label, moe_layers, shard_gib in CASES:
        source = work / "memory"
        total = write(source, moe_layers=moe_layers, experts=24, shard_bytes=int(shard_gib * GIB))
        runs = [ours(source, work / "ours", group_size) for _ in range(rounds)]
        peaks[label] = max(run.peak_pss_bytes for run in runs) / MIB
        name = f"peak PSS, {label} ({total / GIB:.2f} GiB)"
        rows.append(Row(name, peaks[label], "MiB", target=f"<= {MAX_PSS_MIB}", holds=peaks[label] <= MAX_PSS_MIB))
        for tree in (source, work / "ours"):
            shutil.rmtree(tree, ignore_errors=True)
    small, large, fine, coarse = (peaks[label] for label, *_ in CASES)
    for what, low, high in (("source 1 to 4 GiB", small, large), ("shards 0.25 to 2 GiB", fine, coarse)):
        growth = high / low
        holds = growth <= MAX_GROWTH
        rows.append(Row(f"peak PSS growth, {what}", growth, "x", target=f"<= {MAX_GROWTH}", holds=holds))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--work", type=Path, help="directory for sources and outputs (needs 12 GiB)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--group-size", type=int, default=32)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=a.work) as work:
        rows = speed_rows(Path(work), a.group_size, a.rounds) + memory_rows(Path(work), a.group_size, a.rounds)
    write_rows(rows, a.json)


if __name__ == "__main__":
    main()
