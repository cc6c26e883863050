"""Verification of folds: each scale is there, belongs to one up and one down, and is a scale.

Whether it is the right one shows in ``check_errors``: the recorded error of a weight is that of the folded weight.
"""

from __future__ import annotations

from collections import defaultdict

from ...errors import ArtifactError
from ...scheme import FOLD_DTYPE, fold_tensor
from ..artifact import Artifact
from ..folds import Folds
from ..layout import FOLDS, MANIFEST
from ..records import FoldRecord, TensorRecord
from .findings import Findings, Section
from .records import Accounts

Users = dict[str, list[tuple[TensorRecord, FoldRecord]]]  # by name of the scale


def check_folds(
    artifact: Artifact, findings: Findings, accounts: Accounts, read: dict[str, str] | None, *, quick: bool
) -> None:
    """The files in ``folds/`` against the records; nothing where there are neither.

    Args:
        read: digests of the scales as read now; None or without them where that was not done.
        quick: names and shapes only.
    """
    users: Users = defaultdict(list)
    for record in accounts.records.values():
        if record.decode.fold is not None:
            users[record.decode.fold.tensor].append((record, record.decode.fold))
    if artifact.folds is None:
        if users:
            found = f"format version {artifact.manifest.format_version} has no folds, but the records name some"
            findings.problem(FOLDS, found, MANIFEST)
        return
    with findings.section(FOLDS) as section:
        section.summary = f"{len(users):,} scales moved from up to down, each positive and finite"
        if not users and not artifact.folds.path.exists():
            return
        present = artifact.folds.tensors.tensors
        for name in sorted(present.keys() - users.keys()):
            section.problem("belongs to no weight", f"{FOLDS}: {name}")
        for name, weights in sorted(users.items()):
            where = f"{FOLDS}: {name}"
            if name not in present:
                section.problem("is missing", where)
            elif (info := present[name]).dtype != FOLD_DTYPE or not _fits(info.shape, weights):
                section.problem(f"is {info.dtype} {list(info.shape)}, which does not fit its weights", where)
            elif not quick:
                _check_values(artifact.folds, weights[0][1], section)
            _check_pair(name, weights, section)
            for _, fold in weights:
                if (sha256 := (read or {}).get(name, fold.sha256)) != fold.sha256:
                    section.problem(f"holds other bytes than recorded (sha256 {sha256})", where)


def _fits(shape: tuple[int, ...], weights: list[tuple[TensorRecord, FoldRecord]]) -> bool:
    return all(len(record.shape) == 2 and shape == (record.shape[fold.axis],) for record, fold in weights)


def _check_pair(name: str, weights: list[tuple[TensorRecord, FoldRecord]], section: Section) -> None:
    """One up, whose name the scale bears, and the down of the same expert."""
    owners = {fold.axis: record for record, fold in weights}
    if len(weights) != 2 or len(owners) != 2:
        section.problem(f"is used by {len(weights)} weights instead of one up and one down", f"{FOLDS}: {name}")
        return
    up, down = owners[0], owners[1]
    if (up.layer, up.expert) != (down.layer, down.expert) or name != fold_tensor(
        up.name.rpartition(".")[0], 0
    ).name:
        section.problem(f"is used by {up.name} and {down.name}", f"{FOLDS}: {name}")


def _check_values(folds: Folds, fold: FoldRecord, section: Section) -> None:
    try:
        folds.scale(fold)
    except ArtifactError as problem:
        section.problem(problem.what, problem.where)
