"""``quantkit bench``: the group of commands that measure."""

from __future__ import annotations

import click

from ..lazy import Example, LazyGroup

COMMANDS = {
    "serve": ("quantkit.cli.commands.bench_serve:serve", "Put load on a server; throughput, latency, cost."),
}


@click.group(
    "bench",
    cls=LazyGroup,
    lazy=COMMANDS,
    examples=(
        Example("one, four and sixteen requests at a time",
                "quantkit bench serve --url http://127.0.0.1:8000 --concurrency 1,4,16"),
    ),
    short_help="Measure a running server.",
)  # fmt: skip
def bench() -> None:
    """Measure what runs."""
