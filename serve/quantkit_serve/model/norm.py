"""Root mean square norm, with transformers' rounding: the normed values are rounded before the weight."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit_kernels.forward.rows import rms_norm


class RmsNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32 up to the weight."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        """
        Args:
            weight: ``[D]`` in any float type.
            dtype: of what comes in and goes out.
        """
        self._weight, self._eps = weight.float(), eps
        self._has_kernel = dtype is torch.bfloat16

    def __call__(self, x: Tensor) -> Tensor:
        if self._has_kernel:
            return rms_norm(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), self._weight, self._eps).view(
                x.shape
            )
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps) * self._weight
