"""Printing: results to stdout, talk and progress to stderr; the only module that imports rich.

A command makes one ``Console`` from its options and hands it a result twice over: as a document for
``--json`` and as tables for people. Off a terminal nothing is coloured, wrapped or redrawn: tables are as wide
as their content, and progress is a plain line every few seconds, so that logs stay readable. NO_COLOR and
TERM=dumb are honoured.

Source: https://no-color.org; rich 15 (``rich.console``, ``rich.progress``).
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from ..units import format_gb, format_seconds

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

LINE_SECONDS = 5.0  # between two progress lines off a terminal
_UNWRAPPED = 10_000  # columns: wider than any table, so that nothing is cut off a terminal


@dataclass(frozen=True)
class Table:
    """A table for people: a title, column names (``>`` in front: right-aligned) and rows of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]] = field(default_factory=tuple)


Block = str | Table


class Progress(Protocol):
    """What a running piece of work reports to: bytes done so far, and perhaps a word on what it does."""

    def __call__(self, done_bytes: int, note: str = "", total_bytes: int | None = None) -> None: ...


# What would move the cursor, break a line or reverse the text: names of tensors and files come from strangers.
_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_LINES = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# What a step of GitHub Actions would obey: `::` at the beginning of a line, blanks aside, and `##[` anywhere.
_COMMANDS = re.compile(r"^\s*::|##\[", re.MULTILINE)


def visible(text: str, *, lines: bool = False) -> str:
    """Text with its control characters spelt out (``\\x1b``); ``lines``: line ends are meant and stay.

    In a step of GitHub Actions also without workflow commands, which a blank breaks (actions/runner,
    ActionCommand.cs).
    """
    controls = _CONTROLS if lines else _LINES
    text = controls.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return text
    return _COMMANDS.sub(lambda match: f"{match[0][:-1]} {match[0][-1]}", text)


def document(value: Any) -> str:
    """One JSON document as ``--json`` prints it: UTF-8, numbers finite, indented.

    Where stdout can't hold the text (another encoding, a file name that is no text) it is escaped: JSON still.
    A table (a list of lists at the top level, such as the fates of 118,000 tensors) stands one row per line:
    readable, a tenth of the lines, and several times faster to write.
    """
    text = _dump_document(value, ascii_only=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = _dump_document(value, ascii_only=True)
    return text


def _dump_document(value: Any, *, ascii_only: bool) -> str:
    dump = partial(json.dumps, ensure_ascii=ascii_only, allow_nan=False, default=str)
    is_table = {k: isinstance(v, list) and v and isinstance(v[0], list) for k, v in _items(value)}
    text: str = dump({k: None if is_table[k] else v for k, v in value.items()} if is_table else value, indent=2)
    for key in (k for k, yes in is_table.items() if yes):
        rows = ",\n    ".join(map(dump, value[key]))
        text = text.replace(f"\n  {dump(key)}: null", f"\n  {dump(key)}: [\n    {rows}\n  ]", 1)
    return text


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    return value.items() if isinstance(value, dict) else ()


class Console:
    """Where a command prints.

    Args:
        as_json: print the document of a result, not its tables.
        quiet: no talk and no progress; warnings, errors and results still appear.
        verbose: also say what is only interesting when something is wrong.
        mute: print errors only, no results either: for all but one of several processes.
    """

    def __init__(
        self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False, mute: bool = False
    ) -> None:
        self.as_json, self.quiet, self.verbose, self.mute = as_json, quiet or mute, verbose, mute

    def result(self, to_json: Callable[[], Any], blocks: Callable[[], Iterable[Block]]) -> None:
        """Print a result to stdout: the document with ``--json``, else the blocks. Only one of both is made."""
        if self.mute:
            return
        if self.as_json:
            self.raw(document(to_json()))
            return
        from rich.text import Text

        rich = _rich(sys.stdout)
        for block in blocks():
            if isinstance(block, str):
                self.raw(visible(block, lines=True))
                continue
            with rich.capture() as table:
                rich.print(Text(block.title, "bold"), soft_wrap=True)
                rich.print(_rich_table(block))
            self.raw("\n" + "".join(f"{line.rstrip()}\n" for line in table.get().splitlines()))

    def part(self, text: str) -> None:
        """A part of a text that grows, to stdout; nothing with ``--json``."""
        if not self.as_json and not self.mute:
            self._write(visible(text, lines=True))

    def raw(self, text: str) -> None:
        """Text to stdout as it is, with a line end."""
        self._write(text if text.endswith("\n") else text + "\n")

    def _write(self, text: str) -> None:
        """What stdout's encoding can't hold is spelt out."""
        encoding = sys.stdout.encoding or "utf-8"
        try:
            text.encode(encoding, sys.stdout.errors or "strict")
        except UnicodeEncodeError:
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        sys.stdout.write(text)
        sys.stdout.flush()

    def say(self, text: str) -> None:
        """Talk, to stderr; nothing when quiet."""
        if not self.quiet:
            print(visible(text), file=sys.stderr, flush=True)

    def detail(self, text: str) -> None:
        """Talk that only ``-v`` shows."""
        if self.verbose:
            self.say(text)

    def warn(self, warnings: Iterable[str]) -> None:
        """Warnings, to stderr; also when quiet."""
        for text in warnings:
            if not self.mute:
                self._labelled("warning", "yellow", text)

    def error(
        self, what: str, where: str | None = None, accepted: str | None = None, hint: str | None = None
    ) -> None:
        """One error with what is accepted and what to do, to stderr; also when quiet."""
        self._labelled("error", "bold red", f"{where}: {what}" if where else what)
        if accepted:
            print(f"  accepted: {visible(accepted)}", file=sys.stderr)
        if hint:
            print(f"  hint: {visible(hint)}", file=sys.stderr)
        sys.stderr.flush()

    def _labelled(self, label: str, style: str, text: str) -> None:
        text = visible(text)
        if not _is_terminal(sys.stderr):
            print(f"{label}: {text}", file=sys.stderr, flush=True)
            return
        from rich.text import Text

        line = Text.assemble((f"{label}:", style), f" {text}")
        _rich(sys.stderr).print(line, soft_wrap=True)

    @contextmanager
    def progress(
        self, label: str, total_bytes: int | None = None, *, is_counted: bool = False
    ) -> Iterator[Progress]:
        """Report progress of work on ``total_bytes`` (None: told later or never) while the block runs.

        ``is_counted``: what is reported are not bytes but things, or thousandths of the whole.
        """
        if self.quiet:
            yield _no_progress
        elif _is_terminal(sys.stderr):
            with _bar(label, total_bytes, is_counted) as report:
                yield report
        else:
            yield Lines(label, total_bytes, is_counted=is_counted)


class Lines:
    """Progress as plain lines: one every ``LINE_SECONDS`` while work goes on, none for short work."""

    def __init__(
        self,
        label: str,
        total_bytes: int | None,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_counted: bool = False,
    ) -> None:
        self.label, self.total, self.clock, self.is_counted = label, total_bytes, clock, is_counted
        self.stream = stream or sys.stderr
        self.start = self.last = clock()
        self.first_done: int | None = None  # a resumed run begins with much done: that is no speed

    def __call__(self, done_bytes: int, note: str = "", total_bytes: int | None = None) -> None:
        now = self.clock()
        self.total = total_bytes or self.total
        if self.first_done is None:
            self.first_done = done_bytes
        if now - self.last < LINE_SECONDS:
            return
        self.last = now
        rate = (done_bytes - self.first_done) / (now - self.start)
        print(visible(self._line(done_bytes, rate, note)), file=self.stream, flush=True)

    def _line(self, done: int, rate: float, note: str) -> str:
        text = f"{self.label}: " + (f"{done:,}" if self.is_counted else format_gb(done))
        if self.total:
            total = f"{self.total:,}" if self.is_counted else format_gb(self.total)
            text += f" of {total} ({100 * done / self.total:.0f} %)"
        if not self.is_counted:
            text += f", {format_gb(int(rate))}/s"
        is_guess = self.is_counted and self.total and done < self.total / 20  # loading counts as the first steps
        if self.total and rate > 0 and not is_guess:
            text += f", {format_seconds(max(self.total - done, 0) / rate)} left"
        return text + (f", {note}" if note else "")


def _no_progress(done_bytes: int, note: str = "", total_bytes: int | None = None) -> None:
    """Progress of a quiet run."""


@contextmanager
def _bar(label: str, total_bytes: int | None, is_counted: bool) -> Iterator[Progress]:
    from rich import progress as rp

    amounts = (rp.MofNCompleteColumn(),) if is_counted else (rp.DownloadColumn(), rp.TransferSpeedColumn())
    columns = (
        rp.TextColumn("{task.description}"), rp.BarColumn(), *amounts, rp.TextColumn("ETA"),
        rp.TimeRemainingColumn(), rp.TextColumn("{task.fields[note]}", style="dim", markup=False),
    )  # fmt: skip
    with rp.Progress(*columns, console=_rich(sys.stderr), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(label, total=total_bytes, note="")

        def report(done_bytes: int, note: str = "", total_bytes: int | None = None) -> None:
            known = {"total": total_bytes} if total_bytes else {}
            bar.update(task, completed=done_bytes, note=visible(note), **known)  # type: ignore[arg-type]

        yield report


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _rich(stream: TextIO) -> RichConsole:
    from rich.console import Console as RichConsole

    colour = "auto" if _is_terminal(stream) and not os.environ.get("NO_COLOR") else None
    width = None if _is_terminal(stream) else _UNWRAPPED
    return RichConsole(file=stream, width=width, color_system=colour, highlight=False, emoji=False)  # type: ignore[arg-type]


def _rich_table(block: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in block.columns:
        right = name.startswith(">")
        table.add_column(Text(name.removeprefix(">")), justify="right" if right else "left", overflow="fold")
    for row in block.rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table
