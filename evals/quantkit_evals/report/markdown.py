"""Markdown for GITHUB_STEP_SUMMARY and for terminals: the verdict first, then the sections of ``content``.

Source: GitHub Flavored Markdown 0.29, 4.10 (tables); a step's summary holds at most 1 MiB, and more than that is
dropped as a whole (docs.github.com, workflow commands), so a longer one is cut at a section, and says so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from quantkit.artifact.durable import disk_errors

from .content import Section, Table, content, title, verdict_line
from .report import Report
from .text import one_line

SUMMARY_BYTES = 1 << 20
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
_LIST = re.compile(r"^(\d*)([-+.)])")  # would begin a list of its own
# What would be a link by itself (``://`` and the dot of ``www.``), and the beginning of ``:tada:``.
_LINK = re.compile(r":(?=//)|(?<=www)\.|:(?=[\w+\\-]+:)", re.IGNORECASE)
_SPECIAL = re.compile(r"([\\`*_\[\]<>|~#&$@])")


def markdown(report: Report, *, max_bytes: int | None = None) -> str:
    """The report as Markdown, with a final line end.

    Args:
        max_bytes: of UTF-8 at most, cut at a section; None: all of it. The verdict always stays.
    """
    parts = [f"**{escape(verdict_line(report))}**\n", f"### {escape(title(report))}\n"]
    parts += [_section(section) for section in content(report)]
    if max_bytes is None:
        return "\n".join(parts)
    cut = "\nShortened: the rest does not fit here; the JSON document and the HTML page have all of it.\n"
    whole = _fitting(parts, max_bytes)
    if len(whole) == len(parts):
        return "\n".join(parts)
    kept = _fitting(parts, max_bytes - len(cut.encode()))
    text = "\n".join(kept or [f"**{report.outcome.value.upper()}**\n"])
    return text + cut


def check_step_summary(environ: Mapping[str, str] | None = None) -> None:
    """That the report can be appended, asked before anything is measured.

    Raises:
        EnvironmentProblem: the file can't be written.
    """
    if name := (os.environ if environ is None else environ).get(STEP_SUMMARY):
        with disk_errors(Path(name)), open(name, "ab"):
            pass


def append_step_summary(report: Report, environ: Mapping[str, str] | None = None) -> Path | None:
    """Append the report to the file that GITHUB_STEP_SUMMARY names; None (and nothing done) where it names none.

    Raises:
        EnvironmentProblem: the file can't be written.
    """
    name = (os.environ if environ is None else environ).get(STEP_SUMMARY)
    if not name:
        return None
    path = Path(name)
    with disk_errors(path):
        there = path.stat().st_size if path.exists() else 0
        text = "\n" + markdown(report, max_bytes=max(SUMMARY_BYTES - there - 1, 0)) + "\n"
        with path.open("a", encoding="utf-8") as handle:
            handle.write(text)
    return path


def escape(text: str) -> str:
    """Text as it is read: no markup, no table cell, no link, no mention, no emoji, in one line."""
    return _LINK.sub(r"\\\g<0>", _SPECIAL.sub(r"\\\1", one_line(text)))


def _fitting(parts: list[str], max_bytes: int) -> list[str]:
    """As many parts from the front as fit, joined by line ends."""
    used = 0
    for number, part in enumerate(parts):
        used += len(part.encode()) + 1
        if used > max_bytes:
            return parts[:number]
    return parts


def _section(section: Section) -> str:
    lines = [f"#### {escape(section.title)}", ""]
    if section.table is not None:
        lines += [*_table(section.table), ""]
    lines += [f"- {_LIST.sub(_literal, escape(line))}" for line in section.lines]
    return "\n".join(lines) + "\n"


def _literal(found: re.Match[str]) -> str:
    return f"{found[1]}\\{found[2]}"


def _table(table: Table) -> Iterable[str]:
    names = [escape(name.removeprefix(">")) for name in table.columns]
    yield _row(names)
    yield "|" + "|".join("---:" if name.startswith(">") else "---" for name in table.columns) + "|"
    for row in table.rows:
        yield _row([escape(cell) for cell in row])


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
