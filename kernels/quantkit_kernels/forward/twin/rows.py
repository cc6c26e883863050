"""Reference of ``forward/rows.py``."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    out.copy_(weight * wide.to(x.dtype))


def add(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.add(a, b, out=out)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool, out: Tensor) -> None:
    pairs = cos.shape[1]
    rotary, cos, sin = x[..., : 2 * pairs].float(), cos[:, None], sin[:, None]
    if is_interleaved:
        first, second = rotary[..., 0::2], rotary[..., 1::2]
    else:
        first, second = rotary[..., :pairs], rotary[..., pairs:]
    out[..., :pairs] = first * cos - second * sin
    out[..., pairs : 2 * pairs] = second * cos + first * sin
    out[..., 2 * pairs :] = x[..., 2 * pairs :]
