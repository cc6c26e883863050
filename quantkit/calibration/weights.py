"""Where the weights of each routed expert are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quantkit.checkpoint.tensor import StoredWeight
from quantkit.models.classify import Classifier
from quantkit.models.role import Role

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quantkit.checkpoint import Checkpoint

WeightReader = Callable[[StoredWeight, int, int], "NDArray[np.float32]"]  # rows [start, stop) as float32 [n, I]


def routed_experts(
    checkpoint: Checkpoint, classifier: Classifier
) -> dict[tuple[int, int], dict[str, StoredWeight]]:
    """(layer, expert) -> weights by projection (gate, up, down)."""
    found: dict[tuple[int, int], dict[str, StoredWeight]] = {}
    for weight in checkpoint.weights().values():
        role = classifier.role_of(weight.weight.name)
        if role.role is not Role.ROUTED_EXPERT:
            continue
        if role.layer is not None and role.expert is not None and role.projection is not None:
            found.setdefault((role.layer, role.expert), {})[role.projection] = weight
    return found
