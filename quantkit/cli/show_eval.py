"""How ``quantkit eval`` lays out a report for people: the sections of its Markdown, the verdict last.

Last, since a terminal shows the end; a file that is read from its top has the verdict first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .console import Block, Table

if TYPE_CHECKING:
    from quantkit_evals.report.report import Report

_BRIEF = ("compared", "settings", "tasks", "reading")  # what only -v shows: --json and the HTML page have it


def evaluation(report: Report, *, verbose: bool = False) -> Iterator[Block]:
    """``quantkit eval`` and ``quantkit eval compare``.

    Args:
        verbose: also what was compared exactly, the settings, the tasks and how to read it all.
    """
    from quantkit_evals.report.content import content, title, verdict_line
    from quantkit_evals.report.text import one_line

    yield one_line(title(report))
    for section in content(report):
        if section.key in _BRIEF and not verbose:
            continue
        if section.table is not None:
            columns = [one_line(name) for name in section.table.columns]
            rows = [[one_line(cell) for cell in row] for row in section.table.rows]
            yield Table(one_line(section.title), columns, rows)
        elif section.lines:
            yield f"\n{one_line(section.title)}"
        yield from (f"  {one_line(line)}" for line in section.lines)
    yield ""
    yield one_line(verdict_line(report))
