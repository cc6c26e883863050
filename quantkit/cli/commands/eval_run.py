"""``quantkit eval run``: a baseline and candidates on the same items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..console import Console
from ..evaluating import candidate_options, judge_options, report_options, task_options
from ..lazy import Example, command
from ..options import OutputPath, output_options
from ..serving import found

if TYPE_CHECKING:
    from ..evaluating import Asking, Judging, Reporting


@command(
    "run",
    Example("the dual path with FP8 KV pages against the publisher's FP8, judged by the default gate",
            "quantkit eval tiny-glm-w4 --suite quick --gate default"),
    Example("each part by itself: INT4 weights, FP8 pages, both",
            "quantkit eval tiny-glm-w4 --weights int4 --weights dual --kv-dtype bf16 --kv-dtype fp8"),
    Example("your own questions", "quantkit eval tiny-glm-w4 --task mine.yaml --output out"),
    Example("a server that runs the artifact", "quantkit eval tiny-glm-w4 --endpoint http://127.0.0.1:8000/v1"),
    short_help="Evaluate an artifact (the default: `quantkit eval ARTIFACT`).",
)  # fmt: skip
@click.argument("artifact", metavar="ARTIFACT|CHECKPOINT|MODEL")
@task_options
@candidate_options
@judge_options
@report_options
@click.option(
    "-o", "--output", type=OutputPath(), metavar="DIR",
    help="Keep the runs (a record of every item) and the report in this directory.",
)  # fmt: skip
@click.option(
    "--attach/--no-attach", "is_attached", default=True,
    help="Keep them with the artifact as well, in its attachments, if they are figures of its own views; its core "
    "and pair stay what they are (default: --attach).",
)  # fmt: skip
@output_options
@click.pass_context
def run(
    ctx: click.Context, artifact: str, asking: Asking, choice: Any, judging: Judging, reporting: Reporting,
    output: str | None, is_attached: bool, out: Console,
) -> None:  # fmt: skip
    """Score the configurations of an ARTIFACT on the same items as the publisher's own weights, and say what was
    lost, with confidence.

    The baseline is the publisher's view with BF16 KV pages. Figures of dual weights and of FP8 pages are
    decode-forced: continuations go token by token through decode steps. Answers are kept in a cache, so that the
    same command goes on after it was killed. Exit code 1: a gate failed, or is undecided.
    """
    from quantkit_evals.evaluation import measure_model

    reporting.check()
    settings = judging.settings(asking)
    model = found(artifact, out)
    with out.progress("evaluating", is_counted=True) as progress:
        measured = measure_model(
            model, choice(), settings, output=output, is_attached=is_attached, say=out.say,
            on_progress=lambda p: progress(round(1000 * p.share), f"{p.label}: {p.what}", 1000),
        )  # fmt: skip
    ctx.exit(reporting.finish(measured.report, out, measured.keeping))
