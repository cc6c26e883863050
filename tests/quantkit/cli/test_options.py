"""The option set is frozen: a new option is a decision, and it goes into the recipe first."""

from __future__ import annotations

import inspect
from copy import copy
from typing import Any

import click
import pytest

from quantkit.cli.main import cli
from quantkit.cli.options import Choice, recipe_options
from quantkit.plan.capacity import DEFAULT_FRACTION, DEFAULT_GPUS, GPU_MEMORY
from quantkit.recipe import Recipe
from quantkit.recipe.recipe import OPTIONS
from quantkit.recipe.sections import CalibrationSection, DecodeSection, PrefillSection

from .conftest import all_commands

OUTPUT = "--help --json --quiet --verbose"
RECIPE = (
    "--calibration --decode-linears --decode-rest --engine --group-size --layers --length --make-fp8 --max-memory "
    "--max-shard-size --method --mtp --prefill --recipe --revision --route-all --samples --seed --w4"
)
ENGINE = (
    "--deterministic --dtype --fp8-activations --kv-dtype --kv-memory --kv-tags --max-model-len "
    "--max-num-batched-tokens --max-num-seqs --max-waiting --num-speculative-tokens --page-size --prefill-kv "
    "--prefix-cache --speculative --weights"
)
JUDGE = "--confidence --gate --html --junit --margin --markdown --undecided"
GOLDEN = {
    "plan": f"{OUTPUT} {RECIPE} --gpu --gpu-memory --gpus --memory-fraction --output",
    "convert": f"{OUTPUT} {RECIPE} --consume --device --dry-run --jobs --output --plan",
    "verify": f"{OUTPUT} --against --quick",
    "inspect": f"{OUTPUT} --revision --tensor",
    "diff": f"{OUTPUT} --quick",
    "fidelity": f"{OUTPUT} --attach --dtype --text --tokens",
    "eval": "--help",
    "eval run": (
        f"{OUTPUT} {JUDGE} --attach --baseline --cache --chat --dtype --endpoint --endpoint-model "
        "--fp8-activations --kv-dtype --kv-memory --limit --no-cache --output --path --seed --suite --task "
        "--transformers --weights"
    ),
    "eval compare": f"{OUTPUT} {JUDGE} --allow-left-out",
    "eval tasks": OUTPUT,
    "serve": (
        f"{OUTPUT} {ENGINE} --allow-origin --api-key-file --drain --host --inject-fault --max-body --port "
        "--request-timeout --served-model-name --split --split-canary --split-threads"
    ),
    "generate": f"{OUTPUT} {ENGINE} --chat --max-tokens --seed --stop --temperature --top-p",
    "report": OUTPUT,
    "bench": "--help",
    "bench serve": f"{OUTPUT} --concurrency --input-len --model --num-prompts --output-len --plot "
    "--price-per-hour --prompts --rate --seed --stop-at-eos --url --vocab-size --warmup",
    "recipes": OUTPUT,
    "env": OUTPUT,
    "completion": "--help",
}
COMMANDS = all_commands()
SHORT = {"--help": "-h", "--json": None, "--quiet": "-q", "--verbose": "-v", "--output": "-o", "--jobs": "-j"}


def options(name: str) -> dict[str, click.Option]:
    command = copy(COMMANDS[name])
    command._help_option = None  # click keeps the one of the first context, whatever its names for help
    context = click.Context(command, parent=cli.make_context("quantkit", name.split(), resilient_parsing=True))
    found = [p for p in command.get_params(context) if isinstance(p, click.Option)]
    return {max(p.opts, key=len): p for p in found}


def test_the_set_is_frozen() -> None:
    assert {name: sorted(options(name)) for name in COMMANDS} == {n: sorted(t.split()) for n, t in GOLDEN.items()}


def test_short_forms_mean_the_same_everywhere() -> None:
    for name in COMMANDS:
        for long, option in options(name).items():
            short = [o for o in option.opts if not o.startswith("--")]
            assert short == [s for s in [SHORT.get(long)] if s], f"{name} {long}"


@pytest.mark.parametrize(
    ("option", "section", "field"),
    [
        ("--group-size", DecodeSection, "group_size"),
        ("--method", DecodeSection, "method"),
        ("--decode-linears", DecodeSection, "linears"),
        ("--decode-rest", DecodeSection, "rest"),
        ("--mtp", DecodeSection, "mtp"),
        ("--prefill", PrefillSection, "place"),
        ("--engine", Recipe, "engine"),
    ],
)
def test_choices_and_defaults_are_the_recipe_schemas(option: str, section: Any, field: str) -> None:
    found = options("convert")[option]
    schema = section.model_json_schema()["properties"][field]
    assert isinstance(found.type, click.Choice)
    assert sorted(found.type.choices) == sorted(map(str, schema["enum"]))
    assert f"recipe default: {schema['default']}" in (found.help or "")
    assert found.default is None or "Sentinel" in type(found.default).__name__


@pytest.mark.parametrize(
    ("option", "field"),
    [("--calibration", "data"), ("--samples", "samples"), ("--length", "length"), ("--seed", "seed")],
)
def test_calibration_defaults_are_the_recipe_schemas(option: str, field: str) -> None:
    found = options("convert")[option]
    schema = CalibrationSection.model_json_schema()["properties"][field]
    assert f"recipe default: {schema['default']}" in (found.help or "")
    if isinstance(found.type, click.IntRange):
        assert found.type.min == schema["minimum"]


def test_gpus_are_the_ones_that_are_known() -> None:
    found = options("plan")
    assert isinstance(found["--gpu"].type, click.Choice)
    assert sorted(found["--gpu"].type.choices) == sorted(GPU_MEMORY)
    for option, default in (("--gpus", DEFAULT_GPUS), ("--memory-fraction", DEFAULT_FRACTION)):
        assert f"(default: {default})" in (found[option].help or "")


def test_every_recipe_option_reaches_the_recipe() -> None:
    seen: list[Choice] = []

    @click.command()
    @recipe_options
    def command(choice: Choice) -> None:
        seen.append(choice)

    line = (
        "--recipe r --w4 --group-size 64 --method gptq --layers 1-2,4 --prefill copy --make-fp8 "
        "--decode-linears all --decode-rest bf16 --mtp quantize --max-memory 2GiB --max-shard-size 5GB "
        "--calibration my.txt --samples 3 --length 64 --seed 5 --engine llmcompressor"
    )
    command.main(line.split(), standalone_mode=False)
    assert (seen[0].recipe, seen[0].max_memory) == ("r", 2 << 30)
    assert set(seen[0].fields) <= set(OPTIONS)
    recipe = Recipe(schema_version=1, name="x").with_options(**seen[0].fields)
    assert recipe.decode.model_dump(exclude={"scheme", "quantize", "keep"}) == {
        "group_size": 64, "method": "gptq", "linears": "all", "rest": "bf16", "mtp": "quantize",
        "layers": (1, 2, 4),
    }  # fmt: skip
    assert (recipe.prefill.place, recipe.prefill.make_fp8) == ("copy", True)
    assert recipe.output.max_shard_bytes == 5 * 10**9
    assert recipe.engine == "llmcompressor"
    assert recipe.calibration == CalibrationSection(data="my.txt", samples=3, length=64, seed=5)


def test_nothing_given_changes_nothing() -> None:
    seen: list[Choice] = []

    @click.command()
    @recipe_options
    def command(choice: Choice) -> None:
        seen.append(choice)

    command.main([], standalone_mode=False)
    assert seen == [Choice(None, {}, None, ())]


def test_command_bodies_are_thin() -> None:
    for name, command in COMMANDS.items():
        assert command.callback is not None
        source = inspect.getsource(inspect.unwrap(command.callback))
        body = source.rpartition('"""')[2].strip().splitlines()
        assert len(body) <= 26, f"{name}: {len(body)} lines"
