"""Markdown, GitHub's annotations and the terminal: escaping, order, limits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from quantkit.cli.console import Console, Table
from quantkit.cli.show_eval import evaluation
from quantkit.errors import EnvironmentProblem
from quantkit_evals.comparison import Verdict
from quantkit_evals.report.annotations import MOST, annotations, command, is_wanted
from quantkit_evals.report.document import document
from quantkit_evals.report.html import html
from quantkit_evals.report.markdown import SUMMARY_BYTES, append_step_summary, escape, markdown
from quantkit_evals.report.report import Report
from tests.evals.report import builder
from tests.evals.report.builder import gate, kl_rule, points_rule


def tables(text: str) -> list[list[str]]:
    """The lines of each table."""
    return [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]


@pytest.mark.parametrize("name", builder.REPORTS)
def test_markdown_tables_are_whole(name: str) -> None:
    text = markdown(builder.REPORTS[name]())
    text.encode()
    found = tables(text)
    assert len(found) >= 3
    for table in found:
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table}
        assert len(cells) == 1, table
    assert not re.search(r"\b(nan|inf|None)\b", text)


def test_markdown_begins_with_the_verdict() -> None:
    lines = markdown(builder.failed()).splitlines()
    said = "required rules: 1 failed (reported only: 1 undecided); 3 metrics only reported"
    assert lines[0] == f"**FAILED: dual+fp8: gate default, 95 % confidence: {said}**"
    assert "| FAILED | fidelity.kl at most 0.0005 |" in markdown(builder.failed())
    assert "| fidelity.kl | 64 | – | 0.00071 ± 0.00002 nats/token | – | (0.00067 to 0.00075) |" in "\n".join(lines)


def test_every_form_says_why_a_limit_is_what_it_is() -> None:
    report = builder.failed()
    why = "Why fidelity.kl at most 0.0005: Half above what FP8 pages and INT4 cost together."
    assert f"\n- {escape(why)}\n" in markdown(report)
    assert f"<li>{why}</li>" in html(report).decode()
    assert f"  {why}" in list(evaluation(report))
    assert document(report)["candidates"][0]["gate"]["rules"][0]["reason"] == why.partition(": ")[2]
    assert "Why cloze.acc" not in markdown(report)  # its file says nothing


def test_no_text_of_strangers_is_a_command_of_github(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = builder.comparison("dual", left_out=("::error::x ##[error]y",))
    run = replace(found.candidate, candidate={**found.candidate.candidate, "label": "::add-mask::PASSED"})
    report = Report.of(replace(found, candidate=run))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    console = Console(verbose=True)
    console.result(dict, lambda: evaluation(report, verbose=True))
    console.say("  ::stop-commands::x")
    console.error("##[error]x", "::a", "::b", "::c")
    both = capsys.readouterr()
    for line in (both.out + both.err).splitlines():
        assert not line.lstrip().startswith("::") and "##[" not in line
    assert ": :add-mask::PASSED" in both.out and "## [error]y" in both.out
    monkeypatch.delenv("GITHUB_ACTIONS")
    console.say("::a")
    assert capsys.readouterr().err == "::a\n"


def test_markdown_makes_no_links_and_no_emoji() -> None:
    assert escape("see http://evil.example/x, WWW.evil.example :tada: a: b ::c") == (
        "see http\\://evil.example/x, WWW\\.evil.example \\:tada: a: b ::c"
    )


def test_markdown_escapes() -> None:
    assert escape("a|b\nc") == "a\\|b\\\\nc"
    assert escape("<img src=x> [a](b) `c` @all #1 ~~d~~") == (
        "\\<img src=x\\> \\[a\\](b) \\`c\\` \\@all \\#1 \\~\\~d\\~\\~"
    )
    assert not re.search(r"(?<!\\)<", markdown(builder.hostile()))
    for begin, expected in {
        "1. a": "1\\. a",
        "- a": "\\- a",
        "+a": "\\+a",
        "2) a": "2\\) a",
        "2 a": "2 a",
    }.items():
        report = Report.of(builder.comparison("dual", left_out=(begin,)))
        named = replace(report.judged[0].comparison.candidate, candidate={"label": begin})
        report = Report.of(replace(report.judged[0].comparison, candidate=named))
        assert f"\n- {expected}: left out: " in markdown(report)


def test_step_summary_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    assert append_step_summary(builder.passed(), {"GITHUB_STEP_SUMMARY": str(path)}) == path
    assert path.read_text() == "before\n\n" + markdown(builder.passed()) + "\n"
    assert append_step_summary(builder.passed(), {}) is None
    assert append_step_summary(builder.passed(), {"GITHUB_STEP_SUMMARY": ""}) is None
    with pytest.raises(EnvironmentProblem):
        append_step_summary(builder.passed(), {"GITHUB_STEP_SUMMARY": str(tmp_path)})


def test_step_summary_stays_under_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    path.write_bytes(b"x" * (SUMMARY_BYTES - 2000))
    append_step_summary(builder.failed(), {"GITHUB_STEP_SUMMARY": str(path)})
    text = path.read_text()
    assert SUMMARY_BYTES - 2000 < len(text.encode()) <= SUMMARY_BYTES
    assert "**FAILED: " in text and "fidelity.kl at most" in text and "Shortened: " in text
    for most in range(0, 6000, 371):
        assert len(markdown(builder.failed(), max_bytes=most).encode()) <= max(most, 120)
    assert "FAIL" in markdown(builder.failed(), max_bytes=0)


def test_annotations_follow_githubs_rules() -> None:
    assert (
        command("error", "a: b, c%\n", "50 %: x, y\r\nz") == "::error title=a%3A b%2C c%25%0A::50 %25: x, y%0D%0Az"
    )
    lines = annotations(builder.hostile())
    assert all(re.match(r"::(error|warning|notice) title=[^:,\n\r]*::[^\n\r]*$", line) for line in lines)
    "\n".join(lines).encode()


def test_annotations_by_weight() -> None:
    rules = (kl_rule(Verdict.FAIL), points_rule(), kl_rule(Verdict.UNDECIDED))
    lines = annotations(Report.of(builder.comparison(), gate(*rules)))
    kinds = [line.split(" ")[0] for line in lines]
    assert kinds == sorted(kinds)
    assert kinds.count("::error") == 3  # verdict, failed, undecided
    assert "::notice title=quantkit eval%3A dual+fp8%3A undecided%2C reported only::cloze.acc" in "\n".join(lines)
    lenient = annotations(builder.undecided("pass"))
    assert [line.split(" ")[0] for line in lenient][:2] == ["::warning", "::warning"]
    assert annotations(builder.passed())[0].startswith("::notice title=quantkit eval::PASSED: ")
    failed_but_reported = Report.of(builder.comparison(), gate(kl_rule(), points_rule(Verdict.FAIL)))
    assert annotations(failed_but_reported)[0].startswith(
        "::warning title=quantkit eval%3A dual+fp8%3A fail%2C rep"
    )


def test_annotations_beyond_what_github_shows_are_counted() -> None:
    rules = [replace(kl_rule(Verdict.FAIL), rule=f"rule {n}") for n in range(25)]
    lines = annotations(Report.of(builder.comparison(), gate(*rules)))
    errors = [line for line in lines if line.startswith("::error")]
    assert len(errors) == MOST and "17 more; the report has all of them" in errors[-1]


def test_annotations_are_for_github() -> None:
    assert is_wanted({"GITHUB_ACTIONS": "true"})
    assert not is_wanted({"GITHUB_ACTIONS": "false"}) and not is_wanted({})


@pytest.mark.parametrize("name", builder.REPORTS)
def test_the_terminal_shows_the_verdict_last(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = builder.REPORTS[name]()
    Console().result(dict, lambda: evaluation(report, verbose=True))
    out = capsys.readouterr().out
    out.encode()
    last = out.rstrip("\n").splitlines()[-1]
    assert last.startswith(("PASSED: ", "FAILED: ", "UNDECIDED: ", "MEASURED: "))
    assert "\x1b" not in out and not re.search(r"\b(nan|inf|None)\b", out)


def test_the_terminal_says_what_markdown_says() -> None:
    """The same cells; briefly without identity, and with all of it when asked."""
    report = builder.several()
    text = markdown(report)
    blocks = list(evaluation(report, verbose=True))
    cells = {cell for block in blocks if isinstance(block, Table) for row in block.rows for cell in row}
    assert cells and all(escape(cell) in text for cell in cells)
    brief = [block for block in evaluation(report) if isinstance(block, Table)]
    assert not any(block.title == "What was compared" for block in brief)
    assert {"Rules: int4", "Figures: dual against fp8"} <= {block.title for block in brief}
