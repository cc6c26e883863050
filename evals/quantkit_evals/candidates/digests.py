"""What a model's folder is, in digests: the identity of a candidate."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any


def is_artifact(folder: Path) -> bool:
    from quantkit.artifact.layout import MANIFEST

    return (folder / MANIFEST).is_file()


def files_state(*folders: Path) -> str:
    """Digest of names, sizes and times of the files in folders: changes with them, costs no reading.

    Raises:
        OSError: a folder can't be listed.
    """
    there = [folder for folder in folders if folder.is_dir()]  # a view may be stored as a reference
    files = [path for folder in there for path in sorted(folder.iterdir()) if path.is_file()]
    stats = [(path.parent.name, path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def view_folders(folder: Path) -> tuple[Path, ...]:
    """Where the weights of an artifact or a checkpoint are."""
    return (folder / "prefill", folder / "decode") if is_artifact(folder) else (folder,)


def digests(folder: Path) -> dict[str, Any]:
    """An artifact states the digests of all its files in its manifest. A checkpoint's is of its headers, and of
    names, sizes and times of its files, since reading all of it would take minutes.

    Raises:
        ArtifactError, SourceError: the files.
    """
    if is_artifact(folder):
        from quantkit.artifact import Artifact
        from quantkit.artifact.layout import MANIFEST

        manifest = (folder / MANIFEST).read_bytes()
        return {
            "pair_id": Artifact.open(folder).manifest.pair_id,
            "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
        }
    from quantkit.checkpoint import open_checkpoint

    return {
        "checkpoint_fingerprint": open_checkpoint(folder).fingerprint, "files_sha256": files_state(folder),
    }  # fmt: skip
