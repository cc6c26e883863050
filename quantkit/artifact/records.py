"""``tensors.jsonl``: one line per source tensor, in the source's order: what became of it in each view.

A line that keeps its bytes under its name needs no outputs: its ``sha256`` is the output's. Every other outcome
lists the tensors written, with their digests. Error figures stand at the weight, relative to its energy, rounded
to six significant digits: sqrt(sum of squared differences / sum of squared weights). Calibrated weights say how
they were calibrated (``quantkit.calibration.expert.facts``), and where a scale was moved between the weights of an
expert before they were quantized, which one (``folds.py``): error figures are of the folded weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import ArtifactError
from .canonical import canonical_json, parse_json
from .layout import TENSORS

if TYPE_CHECKING:
    from .manifest import Manifest


@dataclass(frozen=True, slots=True)
class FoldRecord:
    """The scale that was moved into or out of a weight before it was quantized.

    Attributes:
        tensor: its name in ``folds/``.
        sha256: of its bytes.
        axis: 0: row j of the weight was divided by entry j (up); 1: column j was multiplied by it (down).
    """

    tensor: str
    sha256: str
    axis: int

    @staticmethod
    def from_json(content: dict[str, Any]) -> FoldRecord:
        """Raises KeyError, TypeError or ValueError for anything else."""
        found = FoldRecord(**content)
        if not isinstance(found.tensor, str) or not isinstance(found.sha256, str) or found.axis not in (0, 1):
            raise ValueError("not a fold")
        return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one view holds of a source tensor: the action (``plan.fate.Action``) and the tensors it became."""

    action: str
    outputs: dict[str, str] = field(default_factory=dict)  # name in the view -> sha256
    method: str | None = None
    group_size: int | None = None
    relative_error: float | None = None
    calibration: dict[str, Any] | None = None
    fold: FoldRecord | None = None

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {"action": self.action}
        if self.outputs:
            content["outputs"] = self.outputs
        for key in ("method", "group_size", "relative_error", "calibration"):
            if (value := getattr(self, key)) is not None:
                content[key] = value
        if self.fold is not None:
            content["fold"] = asdict(self.fold)
        return content

    @staticmethod
    def from_json(content: dict[str, Any]) -> Outcome:
        fold = content.get("fold")
        return Outcome(**{**content, "fold": None if fold is None else FoldRecord.from_json(fold)})

    def tensors(self, name: str, sha256: str) -> dict[str, str]:
        """Name in the view -> sha256 of every tensor this outcome stands for."""
        return {name: sha256} if self.action == "keep" else self.outputs


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One line: the source tensor and its fate in both views."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    sha256: str
    role: str
    layer: int | None
    expert: int | None
    is_mtp: bool
    decode: Outcome
    prefill: Outcome
    reason: str | None = None

    def render(self) -> bytes:
        content: dict[str, Any] = {
            "name": self.name, "dtype": self.dtype, "shape": list(self.shape), "file": self.file,
            "sha256": self.sha256, "role": self.role, "decode": self.decode.to_json(),
            "prefill": self.prefill.to_json(),
        }  # fmt: skip
        for key in ("layer", "expert", "reason"):
            if (value := getattr(self, key)) is not None:
                content[key] = value
        if self.is_mtp:
            content["is_mtp"] = True
        return canonical_json(content) + b"\n"

    def outcome(self, view: str) -> Outcome:
        return self.decode if view == "decode" else self.prefill


def parse_record(line: bytes) -> TensorRecord:
    """Raises ValueError, KeyError or TypeError for a line that is not a record."""
    content = parse_json(line)
    return TensorRecord(
        name=content["name"], dtype=content["dtype"], shape=tuple(content["shape"]), file=content["file"],
        sha256=content["sha256"], role=content["role"], layer=content.get("layer"), expert=content.get("expert"),
        is_mtp=content.get("is_mtp", False), reason=content.get("reason"),
        decode=Outcome.from_json(content["decode"]), prefill=Outcome.from_json(content["prefill"]),
    )  # fmt: skip


def read_records(directory: Path, manifest: Manifest | None = None) -> Iterator[TensorRecord]:
    """The lines of an artifact's ``tensors.jsonl``.

    Args:
        manifest: of the artifact; then the file is held against the size and digest stated there. Another size
            is said before the first line, another digest behind the last: who stops before never hears of it.

    Raises:
        ArtifactError: the file is missing or not the manifest's, or a line is not a record (with its number).
    """
    path = directory / TENSORS
    entry = None if manifest is None else manifest.files.get(TENSORS)
    if manifest is not None and entry is None:
        raise _other(path, "not in the manifest")
    with _opened(path) as handle:
        nbytes = path.stat().st_size
        if entry is not None and nbytes != entry.nbytes:
            raise _other(path, f"{nbytes:,} bytes long, not {entry.nbytes:,} as the manifest says")
        sha256 = hashlib.sha256()
        for number, line in enumerate(handle, 1):
            if entry is not None:
                sha256.update(line)
            try:
                record = parse_record(line)
            except (ValueError, KeyError, TypeError, AttributeError) as problem:
                raise ArtifactError(f"line {number} is not a tensor record", where=str(path)) from problem
            yield record
    if entry is not None and sha256.hexdigest() != entry.sha256:
        raise _other(path, "another file than the one whose digest the manifest states")


def _other(path: Path, found: str) -> ArtifactError:
    return ArtifactError(f"is {found}", where=str(path), hint="Run quantkit verify on the artifact.")


def _opened(path: Path) -> BinaryIO:
    try:
        if path.exists() and not path.is_file():
            raise ArtifactError("is no regular file", where=str(path))
        return open(path, "rb")
    except OSError as problem:
        raise ArtifactError(f"cannot be read ({problem.strerror})", where=str(path)) from problem
