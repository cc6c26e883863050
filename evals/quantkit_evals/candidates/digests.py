"""What a model's folder is, in digests: the identity of a candidate."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any


def is_artifact(folder: Path) -> bool:
    from quantkit.artifact.layout import MANIFEST

    return (folder / MANIFEST).is_file()


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

    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.iterdir()) if p.is_file()]
    files = hashlib.sha256(repr(stats).encode()).hexdigest()
    return {"checkpoint_fingerprint": open_checkpoint(folder).fingerprint, "files_sha256": files}
