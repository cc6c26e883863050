"""``quantkit eval compare``: two runs side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..console import Console
from ..evaluating import judge_options, report_options
from ..lazy import Example, command
from ..options import output_options

if TYPE_CHECKING:
    from ..evaluating import Judging, Reporting


@command(
    "compare",
    Example("what did INT4 change?", "quantkit eval compare out/baseline out/int4-bf16-kv"),
    Example("judge it anew, by another gate", "quantkit eval compare out/baseline out/dual-fp8-kv --gate strict"),
    short_help="Compare two runs, item by item.",
)
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option(
    "--allow-left-out",
    is_flag=True,
    help="Compare what both have, though one of them has more; said in the report.",
)
@judge_options
@report_options
@output_options
@click.pass_context
def compare(
    ctx: click.Context, a: str, b: str, allow_left_out: bool, judging: Judging, reporting: Reporting, out: Console
) -> None:
    """Compare the run B with the run A: scores with errors, paired differences, flips, verdicts. Both are
    directories that `quantkit eval --output` wrote, or from an artifact's attachments.

    Runs whose prompts differ are refused, with the reason. Exit code 1: a gate failed or is undecided.
    """
    from quantkit_evals.evaluation import compare_runs

    reporting.check()
    report = compare_runs(a, b, judging.settings(), allow_left_out=allow_left_out)
    ctx.exit(reporting.finish(report, out))
