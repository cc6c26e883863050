"""Help pages: every one has examples, and every example is valid."""

from __future__ import annotations

import shlex

import click
import pytest

from quantkit.cli.lazy import Command, Example
from quantkit.cli.main import COMMANDS, EXAMPLES, cli

from .conftest import Run


def command(name: str) -> Command:
    found = cli.get_command(click.Context(cli), name)
    assert isinstance(found, Command)
    return found


ALL: list[tuple[str, Example]] = [("quantkit", e) for e in EXAMPLES]
ALL += [(name, example) for name in COMMANDS for example in command(name).examples]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_page(run: Run, name: str) -> None:
    result = run(name, "--help")
    assert (result.code, result.err) == (0, "")
    assert len(command(name).examples) >= 1
    for example in command(name).examples:
        assert f"  # {example.comment}\n  {example.line}\n" in result.out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_of_commands_tells_the_truth(name: str) -> None:
    assert command(name).name == name
    assert command(name).short_help == COMMANDS[name][1]
    assert len(COMMANDS[name][1]) <= 68


@pytest.mark.parametrize(("name", "example"), ALL, ids=[e.line for _, e in ALL])
def test_examples_parse(name: str, example: Example) -> None:
    line = example.line.removeprefix('eval "$(').removesuffix(')"')
    words = shlex.split(line.split(" | ")[0].split(" > ")[0])
    assert words[0] == "quantkit"
    assert name in ("quantkit", words[1])
    context = command(words[1]).make_context(words[1], words[2:], parent=click.Context(cli))
    assert not context.args


def test_options_are_explained() -> None:
    for name in COMMANDS:
        for parameter in command(name).params:
            if isinstance(parameter, click.Option):
                assert parameter.help and parameter.help.endswith((".", ")", "]")), f"{name} {parameter.opts}"


def test_version(run: Run) -> None:
    from importlib.metadata import version

    assert run("--version").out == f"quantkit {version('quantkit')}\n"
