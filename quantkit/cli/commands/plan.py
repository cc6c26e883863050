"""``quantkit plan``: everything that can be said before any work."""

from __future__ import annotations

import click

from quantkit import api

from ..console import Console
from ..lazy import Example, command
from ..options import Choice, OutputPath, Source, gpu_options, output_options, recipe_options, revision_option
from ..planning import planned


@command(
    "plan",
    Example("what would become of the bundled model", "quantkit plan tiny-glm"),
    Example(
        "GLM-5.2 on eight H200 (reads headers over the network, 40 MB)",
        "quantkit plan glm-5.2 --gpu h200 --gpus 8",
    ),
    Example("another GPU, another group size", "quantkit plan glm-5.2 --gpu-memory 140GiB --group-size 128"),
    Example("write the plan down and execute exactly that later", "quantkit plan tiny-glm -o plan.json"),
    Example(
        "the fate of every tensor, for a script", "quantkit plan tiny-glm --json | jq -r '.fate_rows[] | @tsv'"
    ),
    short_help="Say what a conversion would do: sizes, memory, speed, engines.",
)
@click.argument("source", type=Source(), metavar="SOURCE|RECIPE")
@click.option(
    "-o",
    "--output",
    type=OutputPath(),
    metavar="FILE",
    help="Also write the plan to this file, for `convert --plan`.",
)
@gpu_options
@recipe_options
@revision_option
@output_options
def plan(
    source: str, output: str | None, gpu: str | None, gpu_memory: int | None, gpus: int | None,
    memory_fraction: float | None, choice: Choice, revision: str | None, out: Console,
) -> None:  # fmt: skip
    """Say what a conversion of SOURCE would do, before any work and without downloading weights.

    Printed are the fate of every tensor, exact sizes of both views, memory, disk and time, weight bytes read per
    decoded token with the speed-up bound that follows, KV cache and context capacity, and which engines load the
    result.
    """
    from .. import show_plan

    with planned(source, choice, revision, out) as (checkpoint, made):
        out.warn(made.warnings)
        document = api.plan_document(
            made, checkpoint, gpu=gpu, gpu_memory=gpu_memory, gpus=gpus, memory_fraction=memory_fraction,
            output=api.default_output(source, made), max_memory=choice.max_memory,
        )  # fmt: skip
        if output is not None:
            api.save_plan(made, output)
            out.say(f"wrote {output}")
    out.result(lambda: {**document, **made.to_json()}, lambda: show_plan.plan(document, all_reasons=out.verbose))
