"""Checks the Triton kernels on a GPU: correctness of every operation, then a table against the GPU's limits.

    make gpu-check                                  writes out/gpu-check.json
    python -m tools.gpu_check --interpret           the same script on tiny sizes in Triton's interpreter, no GPU

Exit codes: 0 all checks hold; 1 one fails; 4 there is no GPU of sm_90 or newer, or no triton. What the time
allowed does not reach is left out of the table, and said.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

NO_GPU = 4
SECONDS = 450  # of eight minutes
ENV_INTERPRET = "TRITON_INTERPRET"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--interpret", action="store_true", help="run tiny sizes in Triton's interpreter")
    parser.add_argument("--json", type=Path, default=Path("out/gpu-check.json"))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="start nothing new after so long")
    options = parser.parse_args(arguments)
    if options.interpret:
        os.environ[ENV_INTERPRET] = "1"  # before triton is imported
    missing = None if options.interpret else _missing()
    if missing:
        print(f"gpu-check: {missing}; nothing was checked", file=sys.stderr)
        return NO_GPU
    return _check(options)


def _missing() -> str | None:
    """Why the kernels can't run here."""
    import torch

    if os.environ.get(ENV_INTERPRET) == "1":
        return f"{ENV_INTERPRET}=1 is set, which keeps kernels off the GPU (--interpret checks the script with it)"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        return f"the GPU is sm_{major}{minor}, and the kernels are for sm_90 and newer"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed (pip install 'quantkit[triton]')"
    return None


def _check(options: argparse.Namespace) -> int:
    import torch
    import triton

    from .gpu_cases import rows
    from .gpu_correctness import run_checks
    from .gpu_roofline import limits

    start = time.perf_counter()
    device = torch.device("cpu" if options.interpret else "cuda")
    report: dict[str, Any] = {
        "device": "interpreter" if options.interpret else torch.cuda.get_device_name(),
        "torch": torch.__version__, "triton": triton.__version__, "checks": [], "rows": [],
    }  # fmt: skip
    for check in run_checks(device, is_tiny=options.interpret):
        print(
            f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.problem or f'{check.error:.3g}'}", flush=True
        )
        report["checks"].append(asdict(check))
    failed = [check["name"] for check in report["checks"] if not check["ok"]]
    machine = limits(device, is_tiny=options.interpret)
    report |= {"read_gb_per_s": machine.read, "matrix_tflops": machine.matrix}
    print(f"\nread {machine.read or 0:.0f} GB/s, BF16 matrix rate {machine.matrix or 0:.0f} TFLOP/s")
    for row in rows(machine, start + options.seconds):
        share = "" if row.share is None else f", {row.share:.0%} of the {row.bound} limit"
        print(f"{row.name}: {row.seconds * 1e6:.1f} us{share}", flush=True)
        report["rows"].append(asdict(row))
    report |= {"seconds": time.perf_counter() - start, "ok": not failed}
    report["is_complete"] = report["seconds"] <= options.seconds
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    late = "" if report["is_complete"] else "; the table was cut off by --seconds"
    print(f"\n{len(report['checks'])} checks, {len(failed)} failed{late}: {', '.join(failed) or options.json}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
