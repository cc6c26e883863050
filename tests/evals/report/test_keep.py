"""Runs and report in a directory: what was there before never stands beside what is new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import EnvironmentProblem
from quantkit_evals.report.keep import REPORTS, keep
from quantkit_evals.report.report import Report
from quantkit_evals.run_file import read_run
from quantkit_evals.session import Settings, evaluate
from tests.evals.engine.fake import Fake
from tests.evals.engine.small_tasks import cloze


@pytest.fixture(scope="module")
def report() -> Report:
    task = cloze(*({"id": n, "text": f"Number {n} and", "target": f" is {n}"} for n in range(4)))
    return evaluate(Fake("one"), [Fake("two")], Settings((task,)))


def test_an_old_verdict_does_not_outlive_its_runs(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(report, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*REPORTS, "baseline", "two"}
    assert read_run(tmp_path / "two") == report.judged[0].comparison.candidate

    def full(*_: Any) -> None:
        raise EnvironmentProblem("no space left")

    monkeypatch.setattr("quantkit_evals.report.keep.write_run", full)
    with pytest.raises(EnvironmentProblem):
        keep(report, tmp_path)
    assert not any((tmp_path / name).exists() for name in REPORTS)
