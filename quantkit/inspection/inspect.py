"""What a checkpoint is, from its headers alone: family, sizes by role, dtype and storage, what is odd about it.

Nothing of the data is read, so a Hub repository is described without a download. An artifact is described by
its manifest and both of its views.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifact.layout import MANIFEST, VIEW_FILE
from ..checkpoint.tensor import StoredWeight, TensorInfo
from ..errors import QuantkitError, UnsupportedError

if TYPE_CHECKING:
    from ..artifact import Artifact
    from ..checkpoint import Checkpoint


@dataclass(frozen=True)
class Share:
    """A part of a checkpoint: how many tensors and bytes."""

    name: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """Description of one checkpoint or view, or of an artifact with its views.

    Attributes:
        what: ``checkpoint``, ``prefill view``, ``decode view`` or ``artifact``.
        family: table that names its tensors; None when no routed experts were found.
        layers, experts: as the tensor names show them (multi-token-prediction layers counted in ``mtp_layers``).
        by_role, by_dtype, by_storage: shares, largest first.
        pair_id: of a view or an artifact.
        views: the parts of an artifact by name; a view that is only a reference is missing.
        manifest: an artifact's manifest as plain data, without its list of files.
    """

    what: str
    label: str
    kind: str
    revision: str | None = None
    model_type: str | None = None
    family: str | None = None
    fingerprint: str | None = None
    files: int = 0
    tensors: int = 0
    nbytes: int = 0
    layers: int = 0
    mtp_layers: int = 0
    experts: int = 0
    by_role: tuple[Share, ...] = ()
    by_dtype: tuple[Share, ...] = ()
    by_storage: tuple[Share, ...] = ()
    pair_id: str | None = None
    warnings: tuple[str, ...] = ()
    views: dict[str, Inspection] = field(default_factory=dict)
    manifest: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict."""
        return asdict(self)


def is_artifact(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the directory of a finished artifact."""
    return (Path(path) / MANIFEST).is_file()


def describe_checkpoint(checkpoint: Checkpoint) -> Inspection:
    """Describe an open checkpoint or view.

    Raises:
        SourceError: its weights and scales don't fit together.
    """
    from ..models.classify import find_family
    from ..models.config import text_config

    warnings = list(checkpoint.warnings)
    try:
        classifier = find_family(checkpoint.config, checkpoint.tensors)
        warnings += classifier.warnings
    except UnsupportedError as error:
        classifier = None
        warnings.append(error.what)
    roles = {n: classifier.role_of(n) for n in checkpoint.tensors} if classifier else {}
    named = list(checkpoint.tensors.items())
    layers = {r.layer for r in roles.values() if r.layer is not None and not r.is_mtp}
    mtp = {r.layer for r in roles.values() if r.is_mtp}
    what, pair_id = _view_mark(checkpoint)
    model_type = checkpoint.config.get("model_type") or text_config(checkpoint.config).get("model_type")
    return Inspection(
        what=what,
        label=checkpoint.label,
        kind=checkpoint.kind,
        revision=checkpoint.revision,
        model_type=model_type if isinstance(model_type, str) else None,
        family=classifier.family.name if classifier else None,
        fingerprint=checkpoint.fingerprint,
        files=len(checkpoint.files),
        tensors=len(named),
        nbytes=checkpoint.nbytes,
        layers=len(layers),
        mtp_layers=len(mtp),
        experts=1 + max((r.expert for r in roles.values() if r.expert is not None), default=-1),
        by_role=_shares((roles[n].role.value, t) for n, t in named) if roles else (),
        by_dtype=_shares((t.dtype, t) for _, t in named),
        by_storage=_shares(_storages(checkpoint.weights().values(), checkpoint)),
        pair_id=pair_id,
        warnings=tuple(warnings),
    )


def describe_artifact(artifact: Artifact) -> Inspection:
    """Describe an artifact: its manifest, and each view that holds its bytes.

    Raises:
        ArtifactError, SourceError: a view is damaged.
    """
    manifest = artifact.manifest
    views = {v.name: v for v in (artifact.prefill, artifact.decode) if not v.is_reference}
    parts = {name: describe_checkpoint(view.tensors) for name, view in views.items()}
    missing = [n for n, entry in manifest.views.items() if entry.stored == "reference"]
    return Inspection(
        what="artifact",
        label=str(artifact.path),
        kind="local",
        revision=manifest.source.revision,
        model_type=manifest.source.model_type,
        family=manifest.source.family,
        files=len(manifest.files),
        tensors=sum(p.tensors for p in parts.values()),
        nbytes=sum(p.nbytes for p in parts.values()),
        layers=max((p.layers for p in parts.values()), default=0),
        mtp_layers=max((p.mtp_layers for p in parts.values()), default=0),
        experts=max((p.experts for p in parts.values()), default=0),
        pair_id=manifest.pair_id,
        warnings=tuple(f"the {name} view is a reference: its bytes are not in the artifact" for name in missing),
        views=parts,
        manifest=manifest.model_dump(mode="json", exclude={"files": True, "source": {"files"}}),
    )


def _view_mark(checkpoint: Checkpoint) -> tuple[str, str | None]:
    """``decode view`` and its pair id if the directory carries our mark."""
    from ..artifact.view import read_mark

    directory = Path(checkpoint.label)
    if checkpoint.kind != "local" or not (directory / VIEW_FILE).is_file():
        return "checkpoint", None
    try:
        mark = read_mark(directory)
    except QuantkitError:
        return "checkpoint", None
    return f"{mark.view} view", mark.pair_id


def _storages(weights: Iterable[StoredWeight], checkpoint: Checkpoint) -> Iterable[tuple[str, TensorInfo]]:
    """(how it is stored, tensor) for every tensor; what is not part of a 2-D weight is ``other``."""
    stored = {p.name: w.storage.value for w in weights for p in w.parts}
    return ((stored.get(name, "other"), tensor) for name, tensor in checkpoint.tensors.items())


def _shares(named: Iterable[tuple[str, TensorInfo]]) -> tuple[Share, ...]:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, tensor in named:
        counts[name][0] += 1
        counts[name][1] += tensor.nbytes
    shares = (Share(name, tensors, nbytes) for name, (tensors, nbytes) in counts.items())
    return tuple(sorted(shares, key=lambda s: (-s.nbytes, s.name)))
