"""``quantkit convert``: the main job."""

from __future__ import annotations

import click

from quantkit import api

from ..console import Console
from ..lazy import Example, command
from ..options import Choice, Device, OutputPath, Source, output_options, recipe_options, revision_option
from ..planning import planned


@command(
    "convert",
    Example("the bundled model; needs no network", "quantkit convert tiny-glm --w4 -o tiny-glm-w4"),
    Example(
        "GLM-5.2 by its recipe, in 8 GiB of memory", "quantkit convert glm-5.2 --max-memory 8GiB -o glm-5.2-w4"
    ),
    Example(
        "larger groups, rounded to nearest, BF16 rest for engines without FP8 kernels",
        "quantkit convert tiny-glm --group-size 128 --method rtn --decode-rest bf16",
    ),
    Example(
        "a disk that cannot hold source and result together", "quantkit convert glm-5.2 --consume --method mse"
    ),
    Example("exactly what was planned", "quantkit convert --plan plan.json -o glm-5.2-w4"),
    Example("look first", "quantkit convert ./my-finetune --make-fp8 --dry-run"),
    short_help="Convert a checkpoint into a dual-precision artifact.",
)
@click.argument("source", type=Source(), metavar="SOURCE|RECIPE", required=False)
@recipe_options
@revision_option
@click.option(
    "--plan", "plan_file", type=click.Path(), metavar="FILE", help="Execute this plan, made by `quantkit plan -o`."
)
@click.option(
    "-o", "--output", type=OutputPath(), metavar="DIR", help="Where the artifact goes (default: ./NAME-w4-gGROUP)."
)
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Worker threads (default: one per core, at most 8).",
)
@click.option(
    "--device",
    type=Device(),
    metavar="cpu|cuda|cuda:N",
    default="cpu",
    help="Where calibration computes (default: cpu). A GPU gives other bits, as another CPU does.",
)
@click.option(
    "--consume",
    is_flag=True,
    help="Delete each downloaded file of a Hub source once its output is safe; not with gptq.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing; the same as `quantkit plan`.")
@output_options
def convert(
    source: str | None, choice: Choice, revision: str | None, plan_file: str | None, output: str | None,
    jobs: int | None, device: str, consume: bool, dry_run: bool, out: Console,
) -> None:  # fmt: skip
    """Convert SOURCE into an artifact: the publisher's FP8 bytes for prefill, INT4 experts for decode.

    SOURCE may also be a recipe's name or file, which then names the source. Ctrl-C, a full disk or a lost
    connection leave a state from which the same command continues. A finished artifact is left as it is.

    With a quality budget in the recipe, a layer with a weight over its limit is kept unquantized and named, or the
    conversion fails with exit code 1, as the recipe says.
    """
    from .. import show
    from ..show_plan import plan

    with api.together() as ranks, planned(source, choice, revision, out, plan_file) as (checkpoint, made):
        out.warn([*made.warnings, *api.unloadable(made, checkpoint)])
        target = output or api.default_output(source, made)
        if dry_run:
            document = api.plan_document(made, checkpoint, output=target, jobs=jobs, max_memory=choice.max_memory)
            out.result(lambda: {**document, **made.to_json()}, lambda: plan(document, all_reasons=out.verbose))
            return
        if not ranks.is_first:
            api.assist(made, checkpoint, ranks, jobs=jobs, max_memory=choice.max_memory, device=device)
            return
        out.say(f"converting {checkpoint.label} into {target}")
        with out.progress("converting") as report:
            artifact = api.convert(
                made, target, checkpoint=checkpoint, jobs=jobs, max_memory=choice.max_memory, consume=consume,
                on_progress=lambda event: report(event.done_bytes, event.unit, event.total_bytes),
                ranks=ranks, device=device,
            )  # fmt: skip
    if artifact.was_complete:
        out.say(f"{target} was complete already; nothing was done")
    out.warn([amendment.say() for amendment in artifact.manifest.plan_amendments])
    result = api.describe_result(artifact)
    out.result(lambda: result, lambda: show.converted(result))
    out.say(f"check it with `quantkit verify {target}`")
