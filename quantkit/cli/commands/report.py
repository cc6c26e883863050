"""``quantkit report``: the errors of one conversion, or of two side by side."""

from __future__ import annotations

import click

from quantkit import api

from ..console import Console
from ..lazy import Example, command
from ..options import output_options


@command(
    "report",
    Example("errors by layer, and tokens per expert where it was calibrated", "quantkit report tiny-glm-w4"),
    Example("did calibration help, and where?", "quantkit report tiny-glm-rtn tiny-glm-gptq"),
    Example("figures of every expert", "quantkit report tiny-glm-gptq --json"),
    short_help="Show the errors of a conversion, or compare two.",
)
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path(), required=False)
@output_options
def report(a: str, b: str | None, out: Console) -> None:
    """Show what a conversion cost by its records: the artifact A by layer, or A and B, two conversions of the same
    source, by layer and projection.

    Reads the manifest and tensors.jsonl, no tensor data. Errors are of the decode view's weights, relative to the
    source. Calibrated methods accept a larger one for a smaller error of the output: `quantkit fidelity` measures
    what counts. The page attachments/report.html of an artifact shows the same as plots.
    """
    from .. import show_report

    if b is None:
        found = api.report(a)
        out.result(lambda: {"artifact": a, **found}, lambda: show_report.conversion(a, found))
        return
    both = api.compare(a, b)
    out.result(both.to_json, lambda: show_report.comparison(both))
