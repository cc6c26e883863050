"""``quantkit diff``: what differs between two checkpoints."""

from __future__ import annotations

import click

from quantkit import api

from ..console import Console
from ..lazy import Example, command
from ..options import Source, output_options, quick_option

_ROWS = 40


@command(
    "diff",
    Example("what did the conversion change, and by how much?", "quantkit diff tiny-glm tiny-glm-w4/decode"),
    Example("two artifacts (their decode views) after a change of method", "quantkit diff old-w4 new-w4"),
    Example("names, dtypes and shapes only", "quantkit diff --quick tiny-glm ./my-finetune --json"),
    short_help="Compare two checkpoints or views, tensor by tensor.",
)
@click.argument("a", type=Source())
@click.argument("b", type=Source())
@quick_option
@output_options
def diff(a: str, b: str, quick: bool, out: Console) -> None:
    """Compare the checkpoints, views or artifacts A and B: added, removed and changed tensors.

    A weight that is stored differently (FP8 block here, INT4 there) is dequantized on both sides and reported with
    its relative error. An artifact stands for its decode view. Differences are a result, not a failure: the exit
    code is 0 with or without them.
    """
    from .. import show

    with out.progress("comparing") as report:
        found = api.diff(a, b, quick=quick, on_progress=lambda done, total, name: report(done, name, total))
    out.result(found.to_json, lambda: show.difference(found, None if out.verbose else _ROWS))
