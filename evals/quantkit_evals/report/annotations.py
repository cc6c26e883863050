"""GitHub workflow commands: what stops a pipeline as errors, the rest as warnings and notices.

GitHub shows ten of each kind per step and drops the others, so the tenth says how many more there are. Commands
mean something only in a log of GitHub Actions: the caller asks ``is_wanted`` first.

Source: docs.github.com, "Workflow commands for GitHub Actions"; escaping as actions/toolkit (packages/core,
command.ts) has it: ``%``, CR and LF in messages; ``:`` and ``,`` too in properties.
"""

# No import of annotations from __future__: it would take the name of the function.
import os
from collections.abc import Iterator, Mapping
from typing import Literal

from ..comparison import RuleResult, Verdict
from .content import verdict_line
from .gaps import gaps
from .report import Outcome, Report
from .text import one_line
from .wording import rule_line

Kind = Literal["error", "warning", "notice"]
MOST = 10  # of a kind that GitHub shows per step
_ORDER: tuple[Kind, ...] = ("error", "warning", "notice")
_TITLE = "quantkit eval"


def is_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this is a step of GitHub Actions."""
    return (os.environ if environ is None else environ).get("GITHUB_ACTIONS") == "true"


def annotations(report: Report) -> list[str]:
    """Commands, one per line: errors first. Every rule that is not passed, what was not measured, the verdict."""
    found = sorted(_messages(report), key=lambda message: _ORDER.index(message[0]))
    lines = []
    for kind in _ORDER:
        messages = [(title, text) for each, title, text in found if each == kind]
        if len(messages) > MOST:
            more = len(messages) - (MOST - 1)
            messages = [*messages[: MOST - 1], (_TITLE, f"{more:,} more; the report has all of them")]
        lines += [command(kind, title, text) for title, text in messages]
    return lines


def command(kind: Kind, title: str, text: str) -> str:
    """``::error title=TITLE::TEXT``, escaped."""
    return f"::{kind} title={_property(title)}::{_data(text)}"


def _messages(report: Report) -> Iterator[tuple[Kind, str, str]]:
    outcome = report.outcome
    kind: Kind = "notice" if report.is_success else "error"
    if report.is_success and outcome is Outcome.UNDECIDED:
        kind = "warning"
    yield kind, _TITLE, verdict_line(report)
    for judged in report.judged:
        for rule in () if judged.gate is None else judged.gate.rules:
            if rule.verdict is not Verdict.PASS:
                yield _kind(rule, report), f"{_TITLE}: {judged.label}: {_word(rule)}", rule_line(rule)
    for line in gaps(report):
        yield "notice", f"{_TITLE}: not measured", line


def _kind(rule: RuleResult, report: Report) -> Kind:
    if report.stops(rule):
        return "error"
    return "warning" if rule.is_required or rule.verdict is Verdict.FAIL else "notice"


def _word(rule: RuleResult) -> str:
    return f"{rule.verdict.value}, reported only" if not rule.is_required else rule.verdict.value


def _data(text: str) -> str:
    return _decodable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _decodable(text: str) -> str:
    """Without halves of surrogate pairs and without controls, line ends aside: a log is UTF-8 and is shown."""
    return "\n".join("\r".join(one_line(part) for part in line.split("\r")) for line in text.split("\n"))
