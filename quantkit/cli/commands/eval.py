"""``quantkit eval``: the group of what evaluates; without the name of a command it is ``run``."""

from __future__ import annotations

import click

from ..lazy import Example, LazyGroup

_HOME = "quantkit.cli.commands"
COMMANDS = {
    "run": (f"{_HOME}.eval_run:run", "Evaluate an artifact (the default: `quantkit eval ARTIFACT`)."),
    "compare": (f"{_HOME}.eval_compare:compare", "Compare two runs, item by item."),
    "tasks": (f"{_HOME}.eval_tasks:tasks", "List the bundled tasks, suites and gates."),
}


@click.group(
    "eval",
    cls=LazyGroup,
    lazy=COMMANDS,
    default="run",
    examples=(
        Example("does the dual artifact hold the default gate? offline, some minutes",
                "quantkit eval tiny-glm-w4 --suite quick --gate default"),
        Example("two runs that were kept", "quantkit eval compare out/baseline out/int4-bf16-kv"),
    ),
    short_help="Measure what quantization cost, with statistics; gate a pipeline.",
)  # fmt: skip
def evaluation() -> None:
    """Score FP8, INT4 and the dual path on the same items, and say with confidence whether a limit holds.

    `quantkit eval ARTIFACT` is `quantkit eval run ARTIFACT`.
    """
