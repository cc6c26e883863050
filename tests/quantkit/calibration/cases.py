"""Made-up inputs and weights, and GPTQ in float64 as plain loops written from the paper."""

from __future__ import annotations

import numpy as np
import torch

import quantkit_kernels as kernels
from quantkit.calibration import Hessian

Array = np.ndarray


def inputs(seed: int, tokens: int, columns: int) -> torch.Tensor:
    """Correlated inputs whose columns differ in size, as behind a norm."""
    rng = np.random.default_rng(seed)
    mix = np.eye(columns) + 0.5 * rng.standard_normal((columns, columns)) / columns**0.5
    size = np.exp(rng.normal(0, 0.7, columns))
    return torch.from_numpy((rng.standard_normal((tokens, columns)) @ mix * size).astype(np.float32))


def weight(seed: int, outputs: int, columns: int) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.standard_t(5, (outputs, columns)) * 0.02).astype(np.float32)


def hessian(x: torch.Tensor, keep_tokens: int | None = None) -> Hessian:
    h = Hessian(x.shape[1], where="expert 3 gate_proj", keep_tokens=keep_tokens)
    h.add(x)
    return h


def norms(w: Array, q: kernels.Int4Weight, x: torch.Tensor) -> Array:
    """Squared error of every output over the tokens, float64."""
    back = kernels.int4_to_float32(q.packed, q.scale, w.shape[1])
    result: Array = np.square((w.astype(np.float64) - back) @ x.double().numpy().T).sum(1)
    return result


def codes(q: kernels.Int4Weight) -> Array:
    """int64 ``[O, I]``, unpacked by shifts."""
    nibbles = (q.packed[:, :, None].astype(np.int64) >> np.arange(0, 32, 4)) & 15
    return nibbles.reshape(q.packed.shape[0], -1) - 8


def paper_gptq(w: Array, scale: Array, h: Array, order: Array) -> Array:
    """Algorithm 1 of Frantar et al. 2022 with blocks of one: codes ``[O, I]`` in natural order.

    Args:
        w: ``[O, I]``.
        scale: ``[O, I]``, the scale of each weight.
        h: ``[I, I]``, dampened.
        order: columns in the order of quantization.
    """
    rest = w.astype(np.float64)[:, order]
    steps = scale.astype(np.float64)[:, order]
    inverse = np.linalg.inv(h[np.ix_(order, order)])
    upper = np.linalg.cholesky(inverse).T  # inverse = upper^T upper
    found = np.empty(w.shape, np.int64)
    for j in range(w.shape[1]):
        q = np.clip(np.rint(rest[:, j] / steps[:, j]), -8, 7)
        error = (rest[:, j] - q * steps[:, j]) / upper[j, j]
        for k in range(j + 1, w.shape[1]):
            rest[:, k] -= error * upper[j, k]
        found[:, order[j]] = q
    return found
