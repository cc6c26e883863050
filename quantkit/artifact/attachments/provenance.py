"""How an artifact was made, as an in-toto statement with SLSA v1 provenance.

Unsigned here: the statement is what a later signature covers. Subject is the manifest, which lists every core file
with its digest. Source: https://slsa.dev/spec/v1.0/provenance.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..canonical import hash_file, readable_json, utc_now
from ..layout import MANIFEST

if TYPE_CHECKING:
    from ...checkpoint import Checkpoint
    from ..manifest import Manifest

BUILD_TYPE = "https://quantkit.dev/convert/v1"


def render_provenance(
    directory: Path, manifest: Manifest, plan_id: str, checkpoint: Checkpoint, device: str
) -> bytes:
    """The statement's bytes; the manifest is on disk already.

    Args:
        device: that computed; calibrated weights have its bits.
    """
    import quantkit_kernels as kernels

    manifest_sha256, _ = hash_file(directory / MANIFEST)
    source: dict[str, Any] = {"kind": manifest.source.kind, "label": manifest.source.label}
    if manifest.source.revision:
        source["revision"] = manifest.source.revision
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": MANIFEST, "digest": {"sha256": manifest_sha256}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"recipe": manifest.recipe, "source": source},
                "internalParameters": {
                    "plan_id": plan_id, "checkpoint_fingerprint": checkpoint.fingerprint,
                    "pair_id": manifest.pair_id, "kernels": kernels.backend().name,
                },
                "resolvedDependencies": [
                    {"name": name, "digest": {"sha256": entry.sha256}}
                    for name, entry in sorted(manifest.source.files.items())
                ],
            },
            "runDetails": {
                "builder": {
                    "id": "https://quantkit.dev/cli",
                    "version": {
                        "quantkit": manifest.tool["version"], "python": platform.python_version(),
                        "machine": platform.machine(), "device": device,
                    },
                },
                "metadata": {"finishedOn": utc_now()},
            },
        },
    }  # fmt: skip
    return readable_json(statement)
