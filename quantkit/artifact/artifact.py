"""An artifact on disk: two views, a manifest, one line per source tensor.

Opening reads the manifest only. Views open when they are first used; nothing is loaded before a weight is asked
for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .folds import Folds
from .layout import DECODE, FORMAT_VERSION, PREFILL
from .manifest import Manifest, load_manifest
from .records import TensorRecord, read_records
from .view import View

if TYPE_CHECKING:
    from .verify import VerifyReport


class Artifact:
    """A finished artifact; usable as a context manager.

    Attributes:
        path: its directory.
        manifest: the contract.
        decode: INT4 view.
        folds: scales moved between its weights; None where the format has none.
        prefill: FP8 view.
        was_complete: set by ``convert`` when there was nothing left to do.
        warnings: what ``convert`` has to say about this run.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.was_complete = False
        self.warnings: tuple[str, ...] = ()
        views = manifest.views
        self.folds = Folds(path, manifest) if manifest.format_version > FORMAT_VERSION else None
        self.decode = View(
            path / DECODE, is_reference=views["decode"].stored == "reference", folds=self.folds
        )  # fmt: skip
        self.prefill = View(path / PREFILL, is_reference=views["prefill"].stored == "reference")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Artifact:
        """Open a directory.

        Raises:
            ArtifactError: it is not an artifact, or of a version this quantkit does not know.
        """
        directory = Path(path)
        return cls(directory, load_manifest(directory))

    def __repr__(self) -> str:
        return f"<Artifact {self.path}: pair {self.manifest.pair_id[:16]}>"

    def records(self) -> Iterator[TensorRecord]:
        """The fate of every source tensor, in the source's order.

        Raises:
            ArtifactError: the records are damaged or not the manifest's, the latter maybe after the last one.
        """
        return read_records(self.path, self.manifest)

    def verify(self, **options: Any) -> VerifyReport:
        """Check it; options as in :func:`quantkit.artifact.verify.verify_artifact`."""
        from .verify import verify_artifact

        return verify_artifact(self.path, **options)

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()

    def __enter__(self) -> Artifact:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
