"""``quantkit env``: what a bug report needs."""

from __future__ import annotations

from ..console import Console
from ..lazy import Example, command
from ..options import output_options


@command(
    "env",
    Example("the block to paste into a bug report", "quantkit env"),
    Example("one figure for a script", "quantkit env --json | jq .kernels.name"),
    short_help="Show versions, kernels, hardware and settings for a bug report.",
)
@output_options
def env(out: Console) -> None:
    """Show versions, kernels, hardware and settings for a bug report.

    Nothing secret is printed: of a Hub token only whether there is one.
    """
    from ..environment import collect
    from ..show import environment

    report = collect()
    out.result(lambda: report, lambda: environment(report))
