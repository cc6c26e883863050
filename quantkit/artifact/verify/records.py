"""Verification of the accounting: every source tensor once, every view tensor explained, the pairing proof."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from ...errors import ArtifactError
from ...plan.fate import Action
from ...scheme import Fp8Block, Int4Group, OutputTensor
from ..artifact import Artifact
from ..canonical import tensor_root
from ..layout import TENSORS, VIEWS
from ..manifest import Manifest
from ..records import Outcome, TensorRecord, read_records
from ..view import View
from .findings import Findings, Section

_SHA256 = re.compile(r"[0-9a-f]{64}")
_ACTIONS = {action.value for action in Action}
_SAME_BYTES = (Action.KEEP.value, Action.RENAME.value)


@dataclass(slots=True)
class Accounts:
    """What tensors.jsonl claims.

    Attributes:
        records: by source tensor name; a name that stands twice is reported and kept once.
        explained: view -> name in the view -> sha256.
    """

    records: dict[str, TensorRecord] = field(default_factory=dict)
    explained: dict[str, dict[str, str]] = field(default_factory=lambda: {view: {} for view in VIEWS})


def check_records(artifact: Artifact, findings: Findings) -> Accounts:
    """tensors.jsonl against the manifest: number, root, counts; every fate is one we know."""
    accounts = Accounts()
    manifest = artifact.manifest
    with findings.section("records") as section:
        counts: dict[str, Counter[str]] = {view: Counter() for view in VIEWS}
        for record in read_records(artifact.path):  # their digest is a matter of ``files``
            if record.name in accounts.records:
                section.problem("stands twice", f"{TENSORS}: {record.name}")
                continue
            accounts.records[record.name] = record
            if not _SHA256.fullmatch(record.sha256):
                section.problem(f"{record.sha256!r} is not a sha256", f"{TENSORS}: {record.name}")
            for view in VIEWS:
                outcome = record.outcome(view)
                counts[view][outcome.action] += 1
                _enter(accounts, view, record, outcome, section)
        section.summary = f"{len(accounts.records):,} source tensors, each accounted for once"
        if len(accounts.records) != manifest.source.num_tensors:
            section.problem(
                f"{len(accounts.records):,} source tensors accounted for, the manifest says "
                f"{manifest.source.num_tensors:,}", TENSORS,
            )  # fmt: skip
        root = tensor_root((r.name, r.dtype, r.shape, r.sha256) for r in accounts.records.values())
        if root != manifest.source.tensor_root:
            section.problem("the source tensor root does not follow from the records", TENSORS)
        for view in VIEWS:
            if dict(counts[view]) != manifest.counts.get(view):
                section.problem(f"counts of actions in {view} differ from the manifest's", TENSORS)
    return accounts


def _enter(accounts: Accounts, view: str, record: TensorRecord, outcome: Outcome, section: Section) -> None:
    where = f"{TENSORS}: {record.name}"
    if outcome.action not in _ACTIONS:
        section.problem(f"unknown action {outcome.action!r} in {view}", where)
    if outcome.action == Action.EXCLUDE.value:
        if not record.reason:
            section.problem(f"left out of {view} without a reason", where)
        return
    tensors = outcome.tensors(record.name, record.sha256)
    if not tensors:
        section.problem(f"became nothing in {view}", where)
    explained = accounts.explained[view]
    for name, sha256 in tensors.items():
        if explained.setdefault(name, sha256) != sha256:
            section.problem(f"output {name!r} of {view} has two digests", where)


def check_headers(
    view: View, manifest: Manifest, findings: Findings, accounts: Accounts, read: dict[str, str] | None
) -> None:
    """Headers and index of a view against the records; digests of tensors where they were read.

    Opening the view checks that its index and headers agree.
    """
    with findings.section(f"headers of {view.name}") as section:
        tensors = view.tensors.tensors
        section.summary = f"{len(tensors):,} tensors, all explained by the records"
        explained = accounts.explained[view.name]
        for name in sorted(tensors.keys() - explained.keys()):
            section.problem("is explained by no source tensor", f"{view.name}: {name}")
        for name in sorted(explained.keys() - tensors.keys()):
            section.problem("is missing", f"{view.name}: {name}")
        _check_shapes(view, section, accounts)
        root = tensor_root((t.name, t.dtype, t.shape, explained.get(t.name, "")) for t in tensors.values())
        entry = next(entry for name, entry in manifest.views.items() if name == view.name)
        if root != entry.tensor_root:
            section.problem("the tensor root does not follow from headers and records", view.name)
        if len(tensors) != entry.num_tensors or sum(t.nbytes for t in tensors.values()) != entry.nbytes:
            section.problem("number or bytes of tensors differ from the manifest's", view.name)
        for name, sha256 in (read or {}).items():
            if explained.get(name, sha256) != sha256:
                section.problem(f"holds other bytes than recorded (sha256 {sha256})", f"{view.name}: {name}")


def _check_shapes(view: View, section: Section, accounts: Accounts) -> None:
    tensors = view.tensors.tensors
    for record in accounts.records.values():
        for expected in _expected(record, record.outcome(view.name)):
            found = tensors.get(expected.name)
            if found and (found.dtype, found.shape) != (expected.dtype, expected.shape):
                section.problem(
                    f"is {found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}",
                    f"{view.name}: {found.name}",
                )


def _expected(record: TensorRecord, outcome: Outcome) -> tuple[OutputTensor, ...]:
    """Name, dtype and shape of what a record became, as far as the record alone decides it."""
    if outcome.action in _SAME_BYTES:
        names = outcome.tensors(record.name, record.sha256)
        return tuple(OutputTensor(name, record.dtype, record.shape) for name in names)
    module, _, part = record.name.rpartition(".")
    if part != "weight" or len(record.shape) != 2:
        return ()
    shape = record.shape[0], record.shape[1]
    if outcome.action == Action.QUANTIZE.value and outcome.group_size:
        return Int4Group(outcome.group_size).outputs(module, shape)
    if outcome.action == Action.TRANSFORM.value and len(outcome.outputs) == 1:
        return (OutputTensor(f"{module}.weight", "BF16", shape),)
    if outcome.action == Action.TRANSFORM.value:
        return Fp8Block().outputs(module, shape)  # a scale under another name is not looked at
    return ()


def check_pairing(manifest: Manifest, findings: Findings, accounts: Accounts) -> None:
    """Outside of what was quantized or transformed, both views hold the source's bytes."""
    with findings.section("pairing") as section:
        same = changed = 0
        for record in accounts.records.values():
            ends = [record.outcome(view) for view in VIEWS]
            for view, outcome in zip(VIEWS, ends, strict=True):
                is_copy = outcome.action in _SAME_BYTES
                if is_copy and set(outcome.tensors(record.name, record.sha256).values()) != {record.sha256}:
                    section.problem(f"passed through to {view} with another digest", record.name)
                if is_copy and manifest.views and outcome.action == Action.RENAME.value and not outcome.outputs:
                    section.problem(f"renamed in {view} without a new name", record.name)
            if all(outcome.action in _SAME_BYTES for outcome in ends):
                same += 1
            else:
                changed += 1
        section.summary = (
            f"{same:,} tensors byte-identical in both views, {changed:,} quantized, transformed or left out"
        )
        transformed = {
            view
            for view in VIEWS
            for r in accounts.records.values()
            if r.outcome(view).action == Action.TRANSFORM.value
        }
        for name, entry in manifest.views.items():
            if (name in transformed) != bool(entry.transforms):
                raise ArtifactError("the manifest's list of transforms does not fit the records", where=name)
