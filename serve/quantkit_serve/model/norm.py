"""Root mean square norm, with transformers' rounding: the normed values are rounded before the weight."""

from __future__ import annotations

import torch
from torch import Tensor


class RmsNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32 up to the weight."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        """
        Args:
            weight: ``[D]`` in any float type.
            dtype: of what comes in and goes out.
        """
        self._weight = weight.to(dtype) if weight.dtype is not torch.float32 else weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return (self._weight * wide.to(x.dtype)).to(x.dtype)
