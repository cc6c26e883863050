"""Scales that AWQ moved between two weights of an expert, and the weights without them.

Dividing row j of up by s_j and multiplying column j of down by it changes nothing that the expert computes but
rounding (``quantkit.calibration.awq``). The decode view holds the weights after that, which is all that an engine
needs; whoever compares a single weight with the source's needs s, so it is kept beside the views:
``folds/model-layer-00003.safetensors`` holds ``MODULE.awq_scale``, float32 ``[M]``, for each up projection that
was folded. Which weights a scale belongs to stands in ``tensors.jsonl`` (``FoldRecord``), so no name is guessed.

Legend: M inner width of the expert: rows of up, columns of down.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArtifactError
from ..scheme import FOLD_DTYPE
from .layout import FOLDS
from .records import FoldRecord, read_records

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..checkpoint import Checkpoint
    from .manifest import Manifest


class Folds:
    """The folds of an opened artifact; reads nothing before it is asked.

    Args:
        directory: of the artifact.
        manifest: of the artifact, by which the records are known.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory, self._manifest = directory, manifest
        self.path = directory / FOLDS

    @cached_property
    def tensors(self) -> Checkpoint:
        """The files with the scales.

        Raises:
            ArtifactError: there are none.
            SourceError: one of them is damaged.
        """
        from ..checkpoint import open_checkpoint

        if not self.path.is_dir() or not any(self.path.iterdir()):
            raise ArtifactError(
                "the artifact lacks its folds, without which its weights cannot be compared with the source's",
                where=str(self.path), hint="Run quantkit verify on it.",
            )  # fmt: skip
        return open_checkpoint(self.path.absolute())

    @cached_property
    def by_module(self) -> Mapping[str, FoldRecord]:
        """Module of the decode view -> its fold; modules without one are absent.

        Raises:
            ArtifactError: the records are damaged or not the manifest's.
        """
        records = (
            (r.name.rpartition(".")[0], r.decode.fold) for r in read_records(self._directory, self._manifest)
        )
        return {module: fold for module, fold in records if fold is not None}

    def scale(self, fold: FoldRecord) -> NDArray[np.float32]:
        """The scale of a fold, ``[M]``.

        Raises:
            ArtifactError: it is missing, of another form, or not all positive and finite.
        """
        import numpy as np

        where = f"{FOLDS}: {fold.tensor}"
        info = self.tensors.tensors.get(fold.tensor)
        if info is None:
            raise ArtifactError("is missing", where=where)
        if info.dtype != FOLD_DTYPE or len(info.shape) != 1:
            raise ArtifactError(
                f"is {info.dtype} {list(info.shape)}", where=where, accepted=f"{FOLD_DTYPE} of one dimension"
            )
        scale: NDArray[np.float32] = self.tensors.array(info)
        bad = ~(np.isfinite(scale) & (scale > 0))
        if bad.any():
            raise ArtifactError(
                f"entry {int(bad.argmax())} is {scale[bad.argmax()]}, no positive number", where=where
            )
        return scale

    def undo(self, module: str, weight: NDArray[np.float32], start: int = 0) -> NDArray[np.float32]:
        """Rows of a weight of the decode view as they would be without a fold, float32 ``[R, I]``.

        Args:
            weight: rows from ``start`` on.

        Raises:
            ArtifactError: as ``scale``, or a scale that does not fit the weight.
        """
        fold = self.by_module.get(module)
        return weight if fold is None else unfolded(weight, self.scale(fold), fold, start)

    def close(self) -> None:
        if "tensors" in self.__dict__:
            self.tensors.close()
            del self.tensors


def folded(weight: Any, scale: NDArray[np.float32], fold: FoldRecord, start: int = 0) -> Any:
    """Rows of a weight from ``start`` on after the fold, in the dtype of the weight; see ``undo`` for errors."""
    factor = _along(weight, scale, fold, start)
    return weight / factor if fold.axis == 0 else weight * factor


def unfolded(weight: Any, scale: NDArray[np.float32], fold: FoldRecord, start: int = 0) -> Any:
    """The inverse of ``folded`` but for rounding."""
    factor = _along(weight, scale, fold, start)
    return weight * factor if fold.axis == 0 else weight / factor


def _along(weight: Any, scale: NDArray[np.float32], fold: FoldRecord, start: int) -> Any:
    factor = scale[start : start + weight.shape[0], None] if fold.axis == 0 else scale[None]
    if factor.shape[fold.axis] != weight.shape[fold.axis]:
        raise ArtifactError(
            f"has {len(scale)} entries for a weight of shape {list(weight.shape)}", where=f"{FOLDS}: {fold.tensor}"
        )
    return factor
