"""`make bench-serve`: all figures of the server, as JSON and as a markdown table.

    python bench/serve/run.py [--json out/bench/serve.json] [--size mid|small] [--models DIR] [AREA ...]

An area is a script of this folder with a function ``rows(options)``. Each runs in a process of its own, since what
one leaves behind (threads, memory, processes of peers) must not be measured by the next. What is measured stays,
whatever comes after; an area that fails is said and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from options import add_to

from measure import Row, markdown

HERE = Path(__file__).resolve().parent
AREAS = ("model", "decode", "kv", "tags", "peers", "soak")


def measured(area: str, options: argparse.Namespace) -> list[Row] | None:
    """The rows of an area; None if it failed."""
    with tempfile.NamedTemporaryFile(suffix=".json") as found:
        command = [sys.executable, str(HERE / f"{area}.py"), "--json", found.name, "--size", options.size]
        command += ["--models", str(options.models)]
        if options.requests is not None:
            command += ["--requests", str(options.requests)]
        if subprocess.run(command).returncode:
            return None
        return [Row(**row) for row in json.loads(Path(found.name).read_text())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"default: {' '.join(AREAS)}")
    add_to(parser, "out/bench/serve.json")
    options = parser.parse_args()
    if unknown := set(options.areas) - set(AREAS):
        parser.error(f"unknown area {', '.join(sorted(unknown))}; there are {', '.join(AREAS)}")
    rows: list[Row] = []
    tables: list[str] = []
    failed = []
    out = Path(options.json)
    out.parent.mkdir(parents=True, exist_ok=True)
    for area in options.areas or AREAS:
        print(f"-- {area}", flush=True)
        found = measured(area, options)
        if found is None:
            failed.append(area)
            continue
        rows += found
        tables.append(markdown(area, found))
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        out.with_suffix(".md").write_text("\n".join(tables))
    for area in failed:
        print(f"failed: {area}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
