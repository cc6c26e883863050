"""Writes the JSON lines of the bundled tasks; see the package."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import cloze, copies, heldout, next_sentence, structured, tool_calls

FOLDER = Path(__file__).resolve().parents[2] / "evals" / "tasks"
MAKERS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "heldout": heldout.items,
    "cloze": cloze.items,
    "next_sentence": next_sentence.items,
    "copy": copies.items,
    "copy_long": copies.long_items,
    "structured": structured.items,
    "tool_calls": tool_calls.items,
}


def render(name: str) -> bytes:
    """The file of a task."""
    return "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in MAKERS[name]()).encode()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="say what differs, write nothing")
    is_check = parser.parse_args(argv).check
    differing = []
    for name in MAKERS:
        path, data = FOLDER / f"{name}.jsonl", render(name)
        if not is_check:
            path.write_bytes(data)
        elif not path.is_file() or path.read_bytes() != data:
            differing.append(path.name)
        num_items = data.count(b"\n")
        print(f"{name}: {num_items:,} items, {len(data):,} bytes")
    if differing:
        raise SystemExit(f"not as they would be made: {', '.join(differing)}")


if __name__ == "__main__":
    main()
