"""``quantkit fidelity``: what do the INT4 weights cost?"""

from __future__ import annotations

import click

from quantkit import api

from ..console import Console
from ..lazy import Example, command
from ..options import output_options


@command(
    "fidelity",
    Example("both views of an artifact on the bundled held-out text", "quantkit fidelity tiny-glm-w4"),
    Example("on a text of your own, and keep the figures with the artifact",
            "quantkit fidelity tiny-glm-w4 --text my.txt --attach"),
    Example("more tokens, smaller errors", "quantkit fidelity tiny-glm-w4 --tokens 32768 --json"),
    short_help="Measure what INT4 costs: perplexity, KL divergence, flips.",
)  # fmt: skip
@click.argument("artifact", type=click.Path())
@click.option(
    "--tokens",
    type=click.IntRange(min=256),
    metavar="N",
    default=8192,
    help="Tokens to measure on, in blocks of 256 spread over the text (default: 8192).",
)
@click.option(
    "--text",
    type=click.Path(),
    metavar="FILE",
    default="heldout",
    help="UTF-8 text to measure on (default: heldout, bundled, which calibration never sees).",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    help="Arithmetic of both models (default: bfloat16).",
)
@click.option(
    "--attach", is_flag=True, help="Also keep the figures in the artifact, attachments/evals/fidelity.json."
)
@output_options
def fidelity(artifact: str, tokens: int, text: str, dtype: str, attach: bool, out: Console) -> None:
    """Compare the decode view of an ARTIFACT with its prefill view on held-out text: perplexity, KL divergence
    (mean, median, 99th percentile), how often both put the same token first, flips between right and wrong.

    Both views are written as BF16 copies to a temporary directory (TMPDIR) and run by transformers on the CPU;
    both must fit into memory. Needs the extra: pip install 'quantkit[eval]'.
    """
    from quantkit_evals.artifact import check_writable, keep, measure_artifact

    from ..show_fidelity import fidelity as blocks

    with api.Artifact.open(artifact) as opened:
        if attach:
            check_writable(opened)
        found = measure_artifact(opened, text=text, num_tokens=tokens, dtype=dtype, say=out.say).to_json()
        if attach:
            out.say(f"wrote {keep(opened, found)}")
    result = {"artifact": artifact, **found}
    out.result(lambda: result, lambda: blocks(result))
