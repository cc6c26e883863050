"""``quantkit verify``: is the artifact what its manifest says?"""

from __future__ import annotations

import click

from quantkit import api

from ..console import Console
from ..lazy import Example, command
from ..options import Source, output_options, quick_option


@command(
    "verify",
    Example("every byte", "quantkit verify tiny-glm-w4"),
    Example("a look that takes seconds", "quantkit verify tiny-glm-w4 --quick"),
    Example(
        "also hold it against the checkpoint it was made from", "quantkit verify tiny-glm-w4 --against tiny-glm"
    ),
    short_help="Check an artifact against its manifest, or its source.",
)
@click.argument("artifact", type=click.Path())
@quick_option
@click.option("--against", type=Source(), metavar="SOURCE", help="Compare with the source checkpoint as well.")
@output_options
@click.pass_context
def verify(ctx: click.Context, artifact: str, quick: bool, against: str | None, out: Console) -> None:
    """Check an ARTIFACT: digests, headers against index, every source tensor accounted for once, scales, sampled
    dequantization error, pairing of the two views.

    Exit code 0: every check passed. 1: something was found. 3: not an artifact at all.
    """
    from .. import show

    with out.progress("verifying") as progress:
        report = api.verify(
            artifact, quick=quick, against=against,
            on_progress=lambda event: progress(event.done_bytes, event.unit, event.total_bytes),
        )  # fmt: skip
    out.result(report.to_json, lambda: show.verification(report))
    ctx.exit(0 if report.ok else 1)
