"""`make bench`: run every bench script, one after the other, and collect their rows.

    python bench/run_all.py --out DIR

Each script writes DIR/<name>.json (eval/oracle: DIR/eval-oracle.json; kernels/run and serve/run:
DIR/kernels.json and DIR/serve.json with a table each); the exit code is 1 if a script failed or a stated target
was missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = (
    "bench_plan", "bench_convert", "bench_quality", "bench_engines", "bench_few_tokens", "bench_gptq",
    "bench_calibrated", "eval/calibration", "eval/oracle", "eval/quality", "eval/throughput",
    "kernels/run", "serve/run",
)  # fmt: skip
HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    failed, missed = [], []
    for name in SCRIPTS:
        print(f"== {name}", flush=True)
        result = out / f"{name.removesuffix('/run').replace('/', '-')}.json"
        if subprocess.run([sys.executable, str(HERE / f"{name}.py"), "--json", str(result)]).returncode:
            failed.append(name)
            continue
        missed += [row["name"] for row in json.loads(result.read_text()) if row["holds"] is False]
    for kind, names in (("failed", failed), ("target missed", missed)):
        for entry in names:
            print(f"{kind}: {entry}", file=sys.stderr)
    return 1 if failed or missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
