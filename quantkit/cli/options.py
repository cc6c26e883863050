"""Options that more than one command has, each defined once; ``tests/quantkit/cli`` freezes the set.

A knob that changes what is produced goes into the recipe first; the option here is a thin layer that
``Recipe.with_options`` applies. Choices are written out rather than read from the recipe's schema so that
a help page imports no pydantic; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ..errors import QuantkitError
from ..launch import process_of_run
from ..units import parse_bytes
from .console import Console

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]

if TYPE_CHECKING:  # click 8.2 and 8.3 have no type parameter here
    _IntType = click.ParamType[int]
    _StrType = click.ParamType[str]
    _ListType = click.ParamType[tuple[float, ...]]
else:
    _IntType = _StrType = _ListType = click.ParamType


class Bytes(_IntType):
    """A size with its unit: 140GiB, 5GB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_bytes(value)
        except QuantkitError as error:
            self.fail(str(error), param, ctx)


class OutputPath(click.Path):
    """A path to write to; an empty one, as an unset shell variable leaves it, is no wish for the default."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


class Numbers(_ListType):
    """Positive numbers with commas between them: 1,4,16.

    Args:
        kind: int or float.
    """

    name = "numbers"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            numbers = tuple(self.kind(part) for part in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or not all(0 < number < float("inf") for number in numbers):
            what = "whole numbers" if self.kind is int else "numbers"
            self.fail(f"{value!r} is not a list of positive {what}, such as 1,4,16", param, ctx)
        return numbers


class Device(_StrType):
    """The CPU or a CUDA device; whether there is one is found out when it is used."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        kind, colon, number = str(value).partition(":")
        if value != "cpu" and (kind != "cuda" or (colon and not number.isdecimal())):
            self.fail(f"{value!r} is not cpu, cuda or cuda:N", param, ctx)
        return str(value)


class Source(_StrType):
    """A checkpoint; completes file names and the names that need no path."""

    name = "source"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        from quantkit import api

        names = [CompletionItem(n) for n in api.source_names() if n.startswith(incomplete)]
        return names or [CompletionItem(incomplete, type="file")]


class RecipeName(_StrType):
    """A bundled recipe or a YAML file; completes the names."""

    name = "name|file"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        from quantkit import api

        names = [CompletionItem(n) for n in api.recipe_names() if n.startswith(incomplete)]
        return names or [CompletionItem(incomplete, type="file")]


def stacked(*decorators: Decorator[Any]) -> Decorator[Any]:
    """Several options as one decorator, shown in help in the order given."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def output_options(function: F) -> F:
    """``--json``, ``-q`` and ``-v``; the command gets a ``Console`` as ``out``."""

    @wraps(function)
    def with_console(*args: Any, as_json: bool, quiet: bool, verbose: bool, **kwargs: Any) -> Any:
        mute = process_of_run()[0] > 0
        return function(*args, out=Console(as_json=as_json, quiet=quiet, verbose=verbose, mute=mute), **kwargs)

    options = stacked(
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document to stdout."),
        click.option(
            "-q", "--quiet", is_flag=True, help="No progress, no talk: results, warnings and errors only."
        ),
        click.option("-v", "--verbose", is_flag=True, help="Say more; show the traceback of an error."),
    )
    return cast(F, options(with_console))


revision_option = click.option(
    "--revision", metavar="REV", help="Branch, tag or commit of a Hub repository (default: main)."
)

quick_option = click.option(
    "--quick", is_flag=True, help="Read headers and the manifest only, no tensor data (seconds, not minutes)."
)

_RECIPE_OPTIONS = (
    click.option(
        "--recipe", type=RecipeName(), metavar="NAME|FILE",
        help="Bundled recipe or YAML file (default: the one for SOURCE).",
    ),
    click.option("--w4", is_flag=True, help="INT4 weights for decode, the default; says so in a script."),
    click.option(
        "--group-size", type=click.Choice(["32", "64", "128"]),
        help="Columns that share one INT4 scale (recipe default: 32).",
    ),
    click.option(
        "--method", type=click.Choice(["gptq", "awq", "gptq+awq", "mse", "rtn", "autoround"]),
        help="gptq compensates the error with calibration data, awq moves scales from up to down by it, gptq+awq "
        "does both, mse searches the scale of each group, rtn rounds to nearest, autoround learns the rounding "
        "(llm-compressor only; recipe default: gptq).",
    ),
    click.option(
        "--engine", type=click.Choice(["quantkit", "llmcompressor"]),
        help="What quantizes: quantkit, or llm-compressor's gptq or autoround, for models that fit in memory "
        "(recipe default: quantkit).",
    ),
    click.option(
        "--calibration", metavar="FILE|DIR|DATASET|bundled",
        help="Text that gptq learns from: .txt, .jsonl (text or chat messages), a directory of them, or a data "
        "set of the Hub, org/name[@revision][/path][:split] (recipe default: bundled).",
    ),
    click.option(
        "--samples", type=click.IntRange(min=1), metavar="N", help="Calibration samples (recipe default: 128)."
    ),
    click.option(
        "--length", type=click.IntRange(min=2), metavar="N",
        help="Tokens of a calibration sample (recipe default: 256).",
    ),
    click.option(
        "--seed", type=click.IntRange(min=0), metavar="N",
        help="Chooses the calibration samples where the text holds more (recipe default: 0).",
    ),
    click.option("--route-all", is_flag=True, help="Every expert learns from all tokens, not only from its own."),
    click.option(
        "--layers", metavar="3-5,7", help="Quantize only these decoder layers; the others stay as they are."
    ),
    click.option(
        "--prefill", type=click.Choice(["auto", "link", "copy", "reference"]),
        help="How the publisher's files enter the prefill view: hard link, copy, or only their digests "
        "(recipe default: auto, link where that is safe).",
    ),
    click.option(
        "--make-fp8", is_flag=True, help="Derive the FP8 view of a source without one (BF16 or native INT4)."
    ),
    click.option(
        "--decode-linears", type=click.Choice(["routed", "all-mlp", "all"]),
        help="What becomes INT4: routed experts; also shared experts and dense MLPs; also attention "
        "projections (recipe default: routed).",
    ),
    click.option(
        "--decode-rest", type=click.Choice(["fp8", "bf16"]),
        help="What is not INT4 stays FP8 byte for byte, or becomes BF16 for engines without FP8 block kernels "
        "(recipe default: fp8).",
    ),
    click.option(
        "--mtp", type=click.Choice(["keep", "quantize"]),
        help="Experts of multi-token-prediction layers stay FP8, or become INT4 (recipe default: keep).",
    ),
    click.option("--max-memory", type=Bytes(), help="Upper bound of memory for the work, for example 2GiB."),
    click.option("--max-shard-size", type=Bytes(), help="Largest file of a view, for example 5GB."),
)  # fmt: skip

# Command line names of recipe fields where the two differ; the recipe's are shorter because they stand in
# sections.
_FIELDS = {"prefill": "place", "decode_linears": "linears", "decode_rest": "rest"}
_NOT_FIELDS = ("recipe", "w4", "max_memory")


@dataclass(frozen=True)
class Choice:
    """What the recipe options of a command say.

    Attributes:
        recipe: name or file, None: the one for the source.
        fields: recipe fields that were given, by their own name (``Recipe.with_options``).
        max_memory: bytes, of the run and not of the recipe.
        given: the options that decide something about the plan, as typed, for messages.
    """

    recipe: str | None
    fields: dict[str, Any]
    max_memory: int | None
    given: tuple[str, ...]


def recipe_options(function: F) -> F:
    """All options that say what to make; the command gets them as one ``choice``."""
    names = [o.name for o in click.command(stacked(*_RECIPE_OPTIONS)(lambda: None)).params if o.name]

    @wraps(function)
    def with_choice(*args: Any, **kwargs: Any) -> Any:
        values = {name: kwargs.pop(name) for name in names}
        set_values = {n: v for n, v in values.items() if v is not None and v is not False}
        fields = {_FIELDS.get(n, n): v for n, v in set_values.items() if n not in _NOT_FIELDS}
        if "group_size" in fields:
            fields["group_size"] = int(fields["group_size"])
        given = tuple("--" + n.replace("_", "-") for n in set_values if n not in ("max_memory", "w4"))
        choice = Choice(values["recipe"], fields, values["max_memory"], given)
        return function(*args, choice=choice, **kwargs)

    return cast(F, stacked(*_RECIPE_OPTIONS)(with_choice))


gpu_options = stacked(
    click.option("--gpu", type=click.Choice(["a100", "h100", "h200", "b200"]), help="Say how much context fits."),
    click.option("--gpu-memory", type=Bytes(), help="Memory of one GPU instead of --gpu, for example 140GiB."),
    click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="Number of GPUs (default: 8)."),
    click.option(
        "--memory-fraction", type=click.FloatRange(0, 1, min_open=True), metavar="F",
        help="Part of a GPU\'s memory that weights and KV cache may take (default: 0.9).",
    ),
)  # fmt: skip
