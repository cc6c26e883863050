"""A view of an artifact: a Hugging Face checkpoint that knows its partner.

``quantkit_view.json`` in each view carries the pair's id and the digest over the view's own tensors. A server
reads both marks and refuses views of different pairs; it needs nothing else of the artifact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.tensor import StoredWeight
from ..errors import ArtifactError
from .canonical import parse_json, readable_json
from .dequantize import dequantize
from .durable import read_regular
from .folds import Folds
from .layout import FORMAT_VERSION, NUMERICS_VERSION, VIEW_FILE

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class ViewMark:
    """Content of ``quantkit_view.json``."""

    view: str
    pair_id: str
    tensor_root: str
    format_version: int = FORMAT_VERSION
    numerics_version: int = NUMERICS_VERSION

    def render(self) -> bytes:
        return readable_json(asdict(self))


def read_mark(directory: Path) -> ViewMark:
    """The mark of a view directory; raises ArtifactError when it is missing or malformed."""
    path = directory / VIEW_FILE
    try:
        content = parse_json(read_regular(path))
        return ViewMark(**content)
    except OSError as problem:
        raise ArtifactError(f"cannot be read ({problem.strerror})", where=str(path)) from problem
    except (ValueError, TypeError) as problem:
        raise ArtifactError("is not the mark of a view", where=str(path)) from problem


@dataclass(frozen=True)
class ViewWeight:
    """One logical weight ``[O, I]`` of a view, as stored."""

    checkpoint: Checkpoint
    stored: StoredWeight
    folds: Folds | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The exact float32 numbers the stored codes stand for, ``[O, I]``.

        Raises:
            SourceError: a NaN code in an FP8 weight, a scale that is not a positive number.
        """
        return dequantize(self.checkpoint, self.stored)

    def unfolded(self) -> npt.NDArray[np.float32]:
        """``dequantize`` without the scale that AWQ moved into or out of the weight, to compare it with another.

        The same numbers as ``dequantize`` for every weight that was not folded.

        Raises:
            SourceError: as ``dequantize``.
            ArtifactError: the fold is damaged.
        """
        weight = self.dequantize()
        return weight if self.folds is None else self.folds.undo(self.stored.module, weight)


class View:
    """A view of an opened artifact; indexes weights by module name.

    Args:
        directory: the view's directory.
        is_reference: its bytes are elsewhere, only digests are recorded.
        folds: of its weights, where there are some.
    """

    def __init__(self, directory: Path, *, is_reference: bool = False, folds: Folds | None = None) -> None:
        self.path = directory
        self.name = directory.name
        self.is_reference = is_reference
        self.folds = folds
        self._checkpoint: Checkpoint | None = None

    @property
    def mark(self) -> ViewMark:
        return read_mark(self.path)

    @property
    def tensors(self) -> Checkpoint:
        """The view as a checkpoint, opened when first asked for.

        Raises:
            ArtifactError: the view records only a reference to its source.
        """
        if self.is_reference:
            raise ArtifactError(
                "this view is a reference: the artifact records its digests, not its bytes",
                where=str(self.path),
                hint="Open the source it names (manifest.json, source), or convert with --prefill copy",
            )
        if self._checkpoint is None:
            from ..checkpoint import open_checkpoint

            self._checkpoint = open_checkpoint(self.path.absolute())
        return self._checkpoint

    def modules(self) -> Iterator[str]:
        """Names of all two-dimensional weights."""
        return iter(self.tensors.weights())

    def __getitem__(self, module: str) -> ViewWeight:
        weights = self.tensors.weights()
        if module not in weights:
            from difflib import get_close_matches

            near = get_close_matches(module, weights, n=1)
            raise ArtifactError(
                f"no weight of module {module!r}", where=str(self.path),
                hint=f"Did you mean {near[0]!r}?" if near else None,
            )  # fmt: skip
        return ViewWeight(self.tensors, weights[module], self.folds)

    def close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None
        if self.folds is not None:
            self.folds.close()
