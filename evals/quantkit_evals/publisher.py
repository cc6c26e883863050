"""Which weights are the publisher's own: what every candidate is held against.

A derived view is never a baseline: it has lost something already, and what is measured against it looks better
than it is. An artifact made of an FP8 source has the publisher's weights as prefill view, one of a native INT4
source as decode view; one made of a BF16 source has neither, and needs the source itself. A plain checkpoint has
one weight set, and that is it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import UsageError

from .configuration import WeightSet

if TYPE_CHECKING:
    from quantkit.artifact.manifest import Manifest

_WEIGHTS_OF: dict[str, WeightSet] = {"prefill": "fp8", "decode": "int4"}


def publisher_weights(manifest: Manifest) -> WeightSet:
    """``fp8`` or ``int4``: the weight set that holds the source's own bytes.

    Raises:
        UsageError: both views are derived.
    """
    for view, weights in _WEIGHTS_OF.items():
        if manifest.views[view].origin == "publisher":  # type: ignore[index]
            return weights
    raise UsageError(
        "both views of this artifact are derived, so neither can be the baseline",
        where="--baseline", accepted="the directory of the source checkpoint, or a run of it",
        hint="Give the checkpoint that the artifact was made from.",
    )  # fmt: skip


def stored_weights(checkpoint: Path) -> WeightSet:
    """What a plain checkpoint's one weight set is called, as ``quantkit serve --weights`` calls it.

    Raises:
        SourceError, UnsupportedError: the checkpoint.
    """
    from quantkit.checkpoint import open_checkpoint
    from quantkit.checkpoint.tensor import Storage

    weights = open_checkpoint(checkpoint).weights()
    return "int4" if any(weight.storage is Storage.INT4_GROUP for weight in weights.values()) else "fp8"
