"""What the conversion tests share: a small plan, a run, calibration samples, the digests of an artifact's core."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.artifact import Artifact
from quantkit.artifact.records import read_records
from quantkit.calibration.samples import CalibrationSet
from quantkit.checkpoint import open_checkpoint
from quantkit.convert import convert
from quantkit.plan import Plan, build_plan
from tests.recipes import data_free_recipe

ATTACHED = ("README.md", "attachments/", "journal.jsonl")


def plan_of(source: Path | str, **options: Any) -> Plan:
    with open_checkpoint(source) as checkpoint:
        return build_plan(checkpoint, data_free_recipe(**options))


def run(
    source: Path | str, out: Path, *, jobs: int | None = 2, max_memory: int | None = None, consume: bool = False,
    on_progress: Any = None, **options: Any,
) -> Artifact:  # fmt: skip
    """Plan and convert."""
    options.setdefault("method", "rtn")
    with open_checkpoint(source) as checkpoint:
        plan = build_plan(checkpoint, data_free_recipe(**options))
        return convert(
            plan, checkpoint, out, jobs=jobs, max_memory=max_memory, consume=consume, on_progress=on_progress
        )


def samples_of(count: int, length: int, vocabulary: int = 64) -> CalibrationSet:
    """Samples for models without a tokenizer."""
    tokens = np.random.default_rng(count).integers(0, vocabulary, (count, length))
    return CalibrationSet(tokens, f"{count:064x}", {})


def core_digests(artifact: Path) -> dict[str, str]:
    """Path -> sha256 of every core file, read with nothing of ours."""
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(artifact.rglob("*"))
        if path.is_file() and not (name := path.relative_to(artifact).as_posix()).startswith(ATTACHED)
    }


def errors_of(artifact: Path, layer: int | None = None) -> list[float]:
    """Recorded errors of the decode view, of one layer or all."""
    return [
        record.decode.relative_error for record in read_records(artifact)
        if record.decode.relative_error is not None and layer in (None, record.layer)
    ]  # fmt: skip
