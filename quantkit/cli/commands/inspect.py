"""``quantkit inspect``: what something is."""

from __future__ import annotations

import click

from quantkit import api

from ..console import Console
from ..lazy import Example, command
from ..options import Source, output_options, revision_option


@command(
    "inspect",
    Example("the bundled model: family, sizes by role and dtype", "quantkit inspect tiny-glm"),
    Example("a repository on the Hub (reads headers, downloads nothing)", "quantkit inspect zai-org/GLM-5.2-FP8"),
    Example("an artifact with both of its views", "quantkit inspect tiny-glm-w4"),
    Example(
        "statistics and histogram of one dequantized weight",
        "quantkit inspect tiny-glm --tensor model.layers.1.mlp.experts.0.up_proj",
    ),
    short_help="Show what a checkpoint, view, artifact or tensor is.",
)
@click.argument("source", type=Source())
@click.option("--tensor", metavar="NAME", help="Statistics and a histogram of this tensor or module's weight.")
@revision_option
@output_options
def inspect(source: str, tensor: str | None, revision: str | None, out: Console) -> None:
    """Show what SOURCE is: a checkpoint, a view or an artifact, with sizes by role, dtype and storage.

    Headers only are read. With --tensor the numbers of one tensor are read in row tiles; the codes of a quantized
    weight are dequantized first.
    """
    from .. import show

    if tensor is not None:
        found = api.tensor_statistics(source, tensor, revision=revision)
        out.result(found.to_json, lambda: show.statistics(found))
        return
    what = api.inspect(source, revision=revision)
    out.warn(what.warnings)
    out.result(what.to_json, lambda: show.inspection(what))
