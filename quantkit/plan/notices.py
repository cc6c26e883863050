"""What a user should hear of a source that can be converted but is not quite what quantkit knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..models.config import quantization_of

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

KNOWN_METHODS = ("fp8", "compressed-tensors")


def notices(checkpoint: Checkpoint) -> Iterator[str]:
    """Warnings about the source as a whole, in words for the user."""
    method = (quantization_of(checkpoint.config) or {}).get("quant_method")
    if method is not None and method not in KNOWN_METHODS:
        yield (
            f"quantization_config names the method {method!r}, quantkit knows {' and '.join(KNOWN_METHODS)}: "
            "weights are read as their tensors say; compare a few with `quantkit inspect --tensor`"
        )
    fused = [t.name for t in checkpoint.tensors.values() if len(t.shape) == 3 and ".experts" in t.name]
    if fused:
        yield (
            f"{fused[0]}{f' and {len(fused) - 1} others' if len(fused) > 1 else ''}: experts fused into one "
            "three-dimensional tensor pass through unquantized"
        )
