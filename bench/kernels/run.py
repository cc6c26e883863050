"""`make bench-kernels`: all figures of the kernels in one process, as JSON and as a markdown table.

    python bench/kernels/run.py [--json out/bench/kernels.json] [AREA ...]

An area is a script of this folder with a function ``rows()``; ``limits`` comes first, since the others hold their
figures against the bandwidth and matrix rate that it measured in this run. The table goes beside the JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from measure import Row, markdown, write_rows  # noqa: E402 - found through the line above

AREAS = sorted((path.stem for path in HERE.glob("*.py") if path.stem != "run"), key=lambda a: (a != "limits", a))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"default: {' '.join(AREAS)}")
    parser.add_argument("--json", type=Path, default=Path("out/bench/kernels.json"))
    options = parser.parse_args()
    if unknown := set(options.areas) - set(AREAS):
        parser.error(f"unknown area {', '.join(sorted(unknown))}; there are {', '.join(AREAS)}")
    rows: list[Row] = []
    tables: list[str] = []
    for area in options.areas or AREAS:
        print(f"-- {area}", flush=True)
        found = import_module(area).rows()
        rows += found
        tables.append(markdown(area, found))
        write_rows(found, None)
        options.json.parent.mkdir(parents=True, exist_ok=True)  # what is measured stays, whatever comes after
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        options.json.with_suffix(".md").write_text("\n".join(tables))


if __name__ == "__main__":
    main()
