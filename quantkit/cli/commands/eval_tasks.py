"""``quantkit eval tasks``: what can be asked without a network, and what it is judged by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..console import Block, Console, Table
from ..lazy import Example, command
from ..options import output_options


@command(
    "tasks",
    Example("what comes with quantkit", "quantkit eval tasks"),
    short_help="List the bundled tasks, suites and gates.",
)
@output_options
def tasks(out: Console) -> None:
    """List the bundled tasks, suites and gates. Any task that lm-eval knows can be named too, where its data is at
    hand; so can the path of a YAML file of your own (docs/evaluating.md)."""
    from quantkit_evals.catalogue import catalogue

    found = catalogue()
    out.result(lambda: found, lambda: _blocks(found))


def _blocks(found: dict[str, list[dict[str, Any]]]) -> Iterator[Block]:
    yield Table(
        "Tasks", ("name", ">items", "scored by", "metrics", ""),
        [
            [t["name"], f"{t['items']:,}", ", ".join(t["paths"]), ", ".join(t["metrics"]),
             t["description"]]
            for t in found["tasks"]
        ],
    )  # fmt: skip
    yield Table(
        "Suites", ("name", "tasks", ""),
        [[s["name"], ", ".join(s["tasks"]), s["description"]] for s in found["suites"]],
    )  # fmt: skip
    yield Table(
        "Gates", ("name", ">rules", ""), [[g["name"], str(g["rules"]), g["description"]] for g in found["gates"]]
    )
