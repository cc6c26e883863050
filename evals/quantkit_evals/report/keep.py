"""A report and its runs in a directory of the user's choice.

::

    OUT/baseline/          run.json, items.jsonl
    OUT/dual-fp8-kv/       run.json, items.jsonl of a candidate
    OUT/report.json        report.html, report.md, junit.xml

What a run before left there under these names is replaced; nothing else is touched.
"""

from __future__ import annotations

import re
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from quantkit.artifact.canonical import readable_json
from quantkit.artifact.durable import disk_errors, write_file

from ..run_file import write_run
from .document import document
from .html import html
from .junit import junit_xml
from .markdown import markdown
from .report import Report

BASELINE = "baseline"
REPORTS = ("report.json", "report.html", "report.md", "junit.xml")


def check_folder(folder: Path) -> None:
    """That it can be written to; asked before anything is measured.

    Raises:
        EnvironmentProblem: it can't.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def keep(report: Report, folder: Path) -> Path:
    """Write everything; returns the folder.

    Raises:
        EnvironmentProblem: the disk refuses.
        ArtifactError: a run has a number that is not finite.
    """
    check_folder(folder)
    with disk_errors(folder):
        for name in REPORTS:  # first: an old verdict never stands beside new records
            (folder / name).unlink(missing_ok=True)
    write_run(report.judged[0].comparison.baseline, folder / BASELINE)
    for judged in report.judged:
        write_run(judged.comparison.candidate, folder / slug(judged.label))
    made = (
        readable_json(document(report)), html(report), markdown(report).encode(),
        junit_xml(report, made=datetime.now(UTC)),
    )  # fmt: skip
    for name, data in zip(REPORTS, made, strict=True):
        with disk_errors(folder / name):
            write_file(folder / name, data)
    return folder


def slug(label: str) -> str:
    """A label as a name of a folder: ``dual-fp8-kv``; never the baseline's."""
    found = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:60].strip("-") or "run"
    return f"{found}-candidate" if found == BASELINE else found
