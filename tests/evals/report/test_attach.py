"""Results in the attachments: what is written, what replaces what, and that the core stays as it was."""

from __future__ import annotations

import errno
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.artifact import Artifact, verify_artifact
from quantkit.artifact.attachments import add_attachments, read_attachments
from quantkit.errors import EnvironmentProblem, UsageError
from quantkit_evals.report.attach import attach, check_attachable
from quantkit_evals.report.report import Judged, Report
from quantkit_evals.run import Run
from quantkit_evals.run_file import read_run
from tests.evals.report import builder


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    target = tmp_path_factory.mktemp("attach") / "tiny-w4"
    return quantkit.convert(quantkit.plan("tiny-glm", method="rtn"), target)


def of(artifact: Artifact, report: Report) -> Report:
    """The report with the artifact's own pair."""

    def own(run: Run, **more: Any) -> Run:
        return replace(run, candidate={**run.candidate, "pair_id": artifact.manifest.pair_id, **more})

    def judged(one: Judged) -> Judged:
        runs = {"baseline": own(one.comparison.baseline), "candidate": own(one.comparison.candidate)}
        return Judged(replace(one.comparison, **runs), one.gate)

    return Report(tuple(map(judged, report.judged)), report.undecided)


def core(artifact: Artifact) -> dict[str, str]:
    files = [p for p in artifact.path.rglob("*") if p.is_file() and "attachments" not in p.parts]
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_attached_beside_each_other_and_replaced(artifact: Artifact) -> None:
    before = core(artifact)
    report = of(artifact, builder.several())
    found = attach(artifact, report)
    assert len({*found.candidates, found.baseline}) == 4
    for judged, folder in zip(report.judged, found.candidates, strict=True):
        assert sorted(p.name for p in folder.iterdir()) == [
            "items.jsonl",
            "report.html",
            "report.json",
            "run.json",
        ]
        assert read_run(folder) == judged.comparison.candidate
        document = json.loads((folder / "report.json").read_bytes())
        assert [c["candidate"] for c in document["candidates"]] == [judged.comparison.candidate.candidate]
        for side in document["runs"].values():
            for path, sha256 in side.items():
                data = (artifact.path / "attachments" / path).read_bytes()
                assert hashlib.sha256(data).hexdigest() == sha256
        assert len(document["runs"]["baseline"]) == len(document["runs"]["candidate"]) == 2
    assert read_run(found.baseline) == report.judged[0].comparison.baseline
    listed = len(read_attachments(artifact.path))
    again = attach(artifact, of(artifact, builder.several()))
    assert again == found
    folders = sorted((artifact.path / "attachments" / "evals").iterdir())
    assert folders == sorted({*found.candidates, found.baseline})
    assert len(read_attachments(artifact.path)) == listed + 3 * 4 + 2  # the list only grows
    assert core(artifact) == before
    assert verify_artifact(artifact.path, quick=True).ok


def test_another_configuration_or_seed_stands_beside(artifact: Artifact) -> None:
    report = of(artifact, builder.passed())
    (first,) = attach(artifact, report).candidates
    comparison = report.judged[0].comparison
    other = replace(comparison.candidate, settings={**comparison.candidate.settings, "seed": 1})
    (second,) = attach(artifact, Report.of(replace(comparison, candidate=other))).candidates
    assert first != second and read_run(first).settings["seed"] == 0 and read_run(second).settings["seed"] == 1
    (third,) = attach(artifact, of(artifact, builder.failed())).candidates  # judged anew: the same figures
    assert third == first and json.loads((first / "report.json").read_bytes())["outcome"] == "fail"


def test_names_are_safe(artifact: Artifact) -> None:
    report = of(artifact, builder.passed())
    comparison = report.judged[0].comparison
    named = replace(
        comparison.candidate, candidate={**comparison.candidate.candidate, "label": "../../\u202e Ünï/x"}
    )
    (folder,) = attach(artifact, Report.of(replace(comparison, candidate=named))).candidates
    assert folder.parent == artifact.path / "attachments" / "evals" and folder.name.startswith("n-x-")


def test_refuses_figures_of_something_else(artifact: Artifact) -> None:
    with pytest.raises(UsageError, match="of the pair abababababababab can't be attached"):
        attach(artifact, builder.passed())
    with pytest.raises(UsageError, match="of no pair"):
        check_attachable(artifact, None)


def test_read_only_is_said_before_anything_is_measured(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    check_attachable(artifact, artifact.manifest.pair_id)
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(EnvironmentProblem, match="Read-only file system") as problem:
        check_attachable(artifact, artifact.manifest.pair_id)
    assert problem.value.exit_code == 4 and str(artifact.path) in str(problem.value)


def test_several_attachments_are_written_together_or_not_at_all(artifact: Artifact, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        add_attachments(artifact, {"evals/fine.json": b"{}", "../bad": b""})
    assert not (artifact.path / "attachments" / "evals" / "fine.json").exists()
    add_attachments(artifact, {"evals/a.json": b"{}", "evals/b.json": b"{}"})
    with pytest.raises(UsageError, match="exists"):
        add_attachments(artifact, {"evals/a.json": b"1", "evals/c.json": b"1"})
    assert (artifact.path / "attachments" / "evals" / "a.json").read_bytes() == b"{}"
