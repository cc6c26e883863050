"""A change of one layer's fate under the quality budget: what the journal, the manifest and reports say of it.

When all limited weights of a layer are quantized, their recorded relative errors are held against their limits. If
one is over, nothing of the layer is quantized: an engine reads all experts of a layer in one format. The worst
weight is the one that is over its limit by the largest factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ..plan.fate import KEPT_BY_BUDGET


class Worst(BaseModel):
    """The weight that is farthest over its limit: the tensor of the source, its error and its limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: str
    relative_error: float
    limit: float


class Amendment(BaseModel):
    """One layer that stays as ``decode.rest`` has it.

    Attributes:
        weights: how many weights of the layer have a limit.
        over_limit: how many of them were over it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer: int
    action: Literal["keep-fp8"]
    reason: Literal["quality budget"]
    weights: int
    over_limit: int
    worst: Worst

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def say(self) -> str:
        """One sentence for people."""
        return (
            f"layer {self.layer} is not quantized: {self.over_limit:,} of its {self.weights:,} weights are over "
            f"the quality budget, at most {self.worst.relative_error:.4%} where {self.worst.limit:.4%} is allowed "
            f"({self.worst.tensor})"
        )


def judge_layer(layer: int, errors: Mapping[str, float], limits: Mapping[str, float]) -> Amendment | None:
    """The amendment that a layer's errors call for; None when all are within their limits.

    Args:
        errors: recorded relative error by tensor; those without a limit do not count.
        limits: by tensor.
    """
    over = [name for name, limit in limits.items() if errors[name] > limit]
    if not over:
        return None
    worst = min(over, key=lambda name: (-errors[name] / limits[name], name))
    return Amendment(
        layer=layer, action="keep-fp8", reason=KEPT_BY_BUDGET, weights=len(limits), over_limit=len(over),
        worst=Worst(tensor=worst, relative_error=errors[worst], limit=limits[worst]),
    )  # fmt: skip
