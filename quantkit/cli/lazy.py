"""A click group that imports a command only when it runs, and commands that carry their examples.

click lists a group's commands by importing all of them; with this one ``quantkit --help`` imports none, since
names and one-line helps stand in a table (a test holds the table against the commands). Mistyped commands
are answered with the nearest names, also on click 8.2 and 8.3, which do that for options only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple

import click


class Example(NamedTuple):
    """One line of a help page: what it does and how it is typed."""

    comment: str
    line: str


class Command(click.Command):
    """A command whose help ends with examples; tests parse every one of them."""

    def __init__(self, *args: Any, examples: Sequence[Example] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(self.examples, formatter)
        super().format_epilog(ctx, formatter)


class LazyGroup(click.Group):
    """Commands by dotted location: ``{"plan": ("quantkit.cli.commands.plan:plan", "what it does")}``.

    Args:
        default: the command that is meant where none is named. What is named as a command is one: a directory
            that is called so is ``./compare``.
    """

    def __init__(
        self,
        *args: Any,
        lazy: Mapping[str, tuple[str, str]],
        examples: Sequence[Example] = (),
        default: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.lazy, self.default = dict(lazy), default
        self.examples = tuple(examples)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.default is not None and args and args[0] not in (*self.lazy, *ctx.help_option_names):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return None
        module, attribute = self.lazy[cmd_name][0].split(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.lazy and not name.startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(f"No such command {name!r}.{did_you_mean(name, self.lazy)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, short) for name, (_, short) in self.lazy.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(self.examples, formatter)
        super().format_epilog(ctx, formatter)


def command(name: str, *examples: Example, **kwargs: Any) -> Callable[[Callable[..., Any]], Command]:
    """``click.command`` for a ``Command`` with examples."""
    return click.command(name, cls=Command, examples=examples, **kwargs)


def did_you_mean(given: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """`` Did you mean 'plan'?`` (with the leading space), or nothing if no name is near."""
    near = get_close_matches(given, list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def write_examples(examples: Sequence[Example], formatter: click.HelpFormatter) -> None:
    """The Examples section of a help page; lines stay as typed, so that they can be copied."""
    if not examples:
        return
    with formatter.section("Examples"):
        for number, (comment, line) in enumerate(examples):
            if number:
                formatter.write("\n")
            formatter.write(f"{'':>{formatter.current_indent}}# {comment}\n")
            formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
