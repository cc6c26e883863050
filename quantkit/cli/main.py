"""The ``quantkit`` program: the table of commands and the entry point."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from ..launch import process_of_run
from .boundary import guarded
from .lazy import Example, LazyGroup

_HOME = "quantkit.cli.commands"
COMMANDS = {
    "plan": (f"{_HOME}.plan:plan", "Say what a conversion would do: sizes, memory, speed, engines."),
    "convert": (f"{_HOME}.convert:convert", "Convert a checkpoint into a dual-precision artifact."),
    "verify": (f"{_HOME}.verify:verify", "Check an artifact against its manifest, or its source."),
    "inspect": (f"{_HOME}.inspect:inspect", "Show what a checkpoint, view, artifact or tensor is."),
    "diff": (f"{_HOME}.diff:diff", "Compare two checkpoints or views, tensor by tensor."),
    "fidelity": (f"{_HOME}.fidelity:fidelity", "Measure what INT4 costs: perplexity, KL divergence, flips."),
    "eval": (f"{_HOME}.eval:evaluation", "Measure what quantization cost, with statistics; gate a pipeline."),
    "serve": (f"{_HOME}.serve:serve", "Serve an artifact: an OpenAI-compatible reference server."),
    "generate": (f"{_HOME}.generate:generate", "Continue a prompt with an artifact, without a server."),
    "report": (f"{_HOME}.report:report", "Show the errors of a conversion, or compare two."),
    "bench": (f"{_HOME}.bench:bench", "Measure a running server."),
    "recipes": (f"{_HOME}.recipes:recipes", "List and show the bundled recipes, print their schema."),
    "env": (f"{_HOME}.env:env", "Show versions, kernels, hardware and settings for a bug report."),
    "completion": (f"{_HOME}.completion:completion", "Print the completion script of a shell."),
}
TOGETHER = ("convert",)  # what several processes do together; everything else is done by the first
EXAMPLES = (
    Example("convert the bundled model, then check the result", "quantkit convert tiny-glm --w4 -o tiny-glm-w4"),
    Example("what would GLM-5.2 become? (reads headers only)", "quantkit plan glm-5.2 --gpu h200 --gpus 8"),
    Example("check every byte of an artifact", "quantkit verify tiny-glm-w4"),
)


def _print_version(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"quantkit {version('quantkit')}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    examples=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done; 1 a check found something; 2 usage or recipe; 3 source or artifact; "
    "4 environment; 70 a bug in quantkit; 130 interrupted, resumable; 141 the reader of stdout went away.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """From an FP8 Mixture-of-Experts checkpoint to a verified dual-precision artifact: FP8 for prefill,
    INT4 for decode.

    A SOURCE is a local directory, a .safetensors file, a bundled model (tiny-glm, tiny-qwen3), a recipe's name
    (glm-5.2 stands for its Hub repository) or a Hub repository (org/name).
    """
    if process_of_run()[0] > 0 and ctx.invoked_subcommand not in TOGETHER:
        ctx.exit(0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    return guarded(cli, list(sys.argv[1:] if arguments is None else arguments))


def run(*_: Any) -> NoReturn:
    """Console script: as ``main``, and leave the process."""
    sys.exit(main())
