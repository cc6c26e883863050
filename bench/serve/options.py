"""What the scripts of this folder are started with, and the end of each of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measure import Row, write_rows

Size = Literal["mid", "small"]


@dataclass(frozen=True)
class Options:
    """
    Attributes:
        size: of the models; ``small`` also means few repetitions, to try a script, not to measure.
        models: directory where they are kept.
        names: parts to run; empty: all.
        requests: of ``soak``; None: its own number.
    """

    size: Size = "mid"
    models: Path = Path("out/bench/serve-models")
    names: tuple[str, ...] = ()
    requests: int | None = None

    @property
    def is_small(self) -> bool:
        return self.size == "small"


def add_to(parser: argparse.ArgumentParser, json_default: str | None = None) -> None:
    parser.add_argument("--size", choices=["mid", "small"], default="mid", help="small: to try a script")
    parser.add_argument("--models", type=Path, default=Path("out/bench/serve-models"))
    parser.add_argument("--requests", type=int, metavar="N", help="of soak (default: 5,000)")
    parser.add_argument("--json", default=json_default, metavar="FILE")


def script(rows: Callable[[Options], list[Row]], doc: str | None, names: Sequence[str] = ()) -> None:
    """Run one script by its command line."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_to(parser)
    if names:
        parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; default: all")
    given = parser.parse_args()
    chosen = tuple(getattr(given, "names", ()))
    if unknown := set(chosen) - set(names):
        parser.error(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    write_rows(rows(Options(given.size, given.models, chosen, given.requests)), given.json)
