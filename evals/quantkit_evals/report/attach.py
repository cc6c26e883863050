"""A report and its runs in the artifact's attachments: with what exactly was measured, never in its core.

::

    attachments/evals/dual-fp8-kv-3f2a9c01d4e5b6a7/   run.json, items.jsonl, report.json, report.html
    attachments/evals/fp8-8c1d.../                    run.json, items.jsonl of the baseline

The folder's name ends in a digest of what was measured: candidate, settings, tasks and, for a candidate, its
baseline. So another configuration stands beside the first, and the same one again replaces it. What a gate said
is in report.json and counts for nothing in the name: the figures are the same, judged anew.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.artifact.canonical import digest_json, readable_json, sha256_hex
from quantkit.errors import UsageError

from ..artifact import check_writable
from ..run import Run
from ..run_file import write_run
from .document import document
from .html import html
from .report import Report

if TYPE_CHECKING:
    from quantkit.artifact import Artifact

FOLDER = "evals"
REPORT_JSON, REPORT_HTML = "report.json", "report.html"
_DIGITS = 16  # of the digest in a folder's name
_LONGEST = 40  # characters of the label in it


@dataclass(frozen=True, slots=True)
class Attached:
    """What was written: the folder of each candidate, in the report's order, and the baseline's."""

    candidates: tuple[Path, ...]
    baseline: Path


def check_attachable(artifact: Artifact, pair_id: str | None) -> None:
    """Whether figures of a candidate could be kept in this artifact; asked before anything is measured.

    Args:
        pair_id: that the candidate states; None: it states none (an endpoint, a model of transformers).

    Raises:
        UsageError: they are not figures of this artifact.
        EnvironmentProblem: the artifact can't be written to.
    """
    own = artifact.manifest.pair_id
    if pair_id != own:
        whose = "of no pair" if pair_id is None else f"of the pair {pair_id[:16]}"
        raise UsageError(
            f"figures {whose} can't be attached to the pair {own[:16]}", where=str(artifact.path),
            accepted="candidates that are views of this artifact",
        )  # fmt: skip
    check_writable(artifact)


def attach(artifact: Artifact, report: Report) -> Attached:
    """Attach every candidate with its own report, and the baseline's run; older ones of the same are replaced.

    Raises:
        UsageError: a candidate's ``pair_id`` is not the artifact's.
        ArtifactError: a run that can't be written (a number is not finite), or a damaged list of attachments.
        EnvironmentProblem: the disk refuses.
    """
    from quantkit.artifact.attachments import add_attachments

    for judged in report.judged:
        check_attachable(artifact, judged.comparison.candidate.candidate.get("pair_id"))
    baseline = report.judged[0].comparison.baseline
    at = _folder(baseline, None)
    of_baseline = _run_files(baseline, at)
    files, folders = dict(of_baseline), []
    for judged in report.judged:
        folder = _folder(judged.comparison.candidate, baseline)
        of_candidate = _run_files(judged.comparison.candidate, folder)
        alone = Report((judged,), report.undecided)
        runs = {"baseline": _digests(of_baseline), "candidate": _digests(of_candidate)}
        files |= of_candidate
        files[f"{folder}/{REPORT_JSON}"] = readable_json({**document(alone), "runs": runs})
        files[f"{folder}/{REPORT_HTML}"] = html(alone)
        folders.append(folder)
    root = add_attachments(artifact, files, replace=True)
    return Attached(tuple(root / folder for folder in folders), root / at)


def _folder(run: Run, baseline: Run | None) -> str:
    said = [_identity(run)] if baseline is None else [_identity(run), _identity(baseline)]
    label = re.sub(r"[^a-z0-9]+", "-", run.label.lower()).strip("-")[:_LONGEST].strip("-") or "run"
    return f"{FOLDER}/{label}-{digest_json(said)[:_DIGITS]}"


def _identity(run: Run) -> dict[str, Any]:
    """What was measured, without what was found."""
    return {
        "candidate": dict(run.candidate), "settings": dict(run.settings),
        "tasks": [[task.name, task.version, task.path] for task in run.tasks],
    }  # fmt: skip


def _run_files(run: Run, folder: str) -> dict[str, bytes]:
    """The files of a run as ``write_run`` writes them."""
    with tempfile.TemporaryDirectory(prefix="quantkit-eval-") as scratch:
        write_run(run, Path(scratch))
        return {f"{folder}/{path.name}": path.read_bytes() for path in sorted(Path(scratch).iterdir())}


def _digests(files: dict[str, bytes]) -> dict[str, str]:
    """Path among the attachments -> SHA-256."""
    return {path: sha256_hex(data) for path, data in files.items()}
