"""Help pages: every one has examples, and every example is valid."""

from __future__ import annotations

import shlex

import click
import pytest

from quantkit.cli.lazy import Example, LazyGroup
from quantkit.cli.main import EXAMPLES, cli

from .conftest import Run, all_commands

COMMANDS = all_commands()
ALL: list[tuple[str, Example]] = [("quantkit", e) for e in EXAMPLES]
ALL += [(name, example) for name, command in COMMANDS.items() for example in command.examples]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_page(run: Run, name: str) -> None:
    result = run(*name.split(), "--help")
    assert (result.code, result.err) == (0, "")
    assert len(COMMANDS[name].examples) >= 1
    for example in COMMANDS[name].examples:
        assert f"  # {example.comment}\n  {example.line}\n" in result.out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_of_commands_tells_the_truth(name: str) -> None:
    above, _, last = name.rpartition(" ")
    group = COMMANDS[above] if above else cli
    assert isinstance(group, LazyGroup)
    assert COMMANDS[name].name == last
    assert COMMANDS[name].short_help == group.lazy[last][1]
    assert len(group.lazy[last][1]) <= 68


@pytest.mark.parametrize(("name", "example"), ALL, ids=[e.line for _, e in ALL])
def test_examples_parse(name: str, example: Example) -> None:
    line = example.line.removeprefix('eval "$(').removesuffix(')"')
    words = shlex.split(line.split(" | ")[0].split(" > ")[0])
    assert words[0] == "quantkit"
    path, arguments = [words[1]], words[2:]
    while isinstance(group := COMMANDS[" ".join(path)], LazyGroup):
        is_named = group.default is None or arguments[0] in group.lazy
        path.append(arguments.pop(0) if is_named else group.default)
    typed = " ".join(path)
    assert name == "quantkit" or typed.startswith(name)
    context = COMMANDS[typed].make_context(path[-1], arguments, parent=click.Context(cli))
    assert not context.args


def test_options_are_explained() -> None:
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help and parameter.help.endswith((".", ")", "]")), f"{name} {parameter.opts}"


def test_version(run: Run) -> None:
    from importlib.metadata import version

    assert run("--version").out == f"quantkit {version('quantkit')}\n"
