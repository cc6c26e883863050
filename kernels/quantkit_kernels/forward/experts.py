"""The routed experts of a layer in one call: each token through its top-k SwiGLU experts, weighted and summed.

    h = bfloat16(silu(x gate^T) * (x up^T))      y = bfloat16(sum over experts, ascending, of weight * (h down^T))

with float32 sums, products and silu; only h and y are rounded. Tokens are grouped by expert, so that an expert's
weights are read once per call however many tokens it has. Routing, shared experts and gradients are left out.

Errors, against the same formula in float64 with h rounded too: at most 2^-7 |y| + 2^-7 sum over experts of
|weight| sum over I of |h||down| (h may round the other way where it is close to a tie); the root mean square error
is below 2^-7 of that of y. The native code gives a token the same bits whatever else is in the batch, for any
number of threads. Inf and NaN propagate to the tokens that meet them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import check
from .choice import implementation
from .weights import Experts, Fp8Weight, Int4Weight

MOST_CHOICES = 1 << 16  # K: far more than any model's; times a chunk of tokens it fits an int32


def moe_int4(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Experts[Int4Weight],
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The experts of a layer in group INT4.

    Args:
        hidden: bfloat16 ``[T, H]``, contiguous rows.
        topk_ids: int32 or int64 ``[T, K]``, experts in [0, E); -1 is skipped (an expert that lives elsewhere).
            Other numbers are refused in host memory and skipped on a GPU, where a check would wait for the device.
            K is at most 65536.
        topk_weights: float32 ``[T, K]``.
        experts: E experts.
        out: bfloat16 ``[T, H]``, contiguous, to write to.

    Returns:
        bfloat16 ``[T, H]``; errors as in the module's description.

    Raises:
        TypeError, ValueError: an argument does not fit, or ``out`` shares memory with another; it is named.
    """
    _check_format(experts, Int4Weight)
    result = _checked(hidden, topk_ids, topk_weights, experts, out)
    return _run(implementation("experts", hidden).moe_int4, hidden, topk_ids, topk_weights, experts, result)


def moe_fp8(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Experts[Fp8Weight],
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The experts of a layer in block FP8; arguments, result and errors as for ``moe_int4``."""
    _check_format(experts, Fp8Weight)
    result = _checked(hidden, topk_ids, topk_weights, experts, out)
    return _run(implementation("experts", hidden).moe_fp8, hidden, topk_ids, topk_weights, experts, result)


def _check_format(experts: Experts[Int4Weight] | Experts[Fp8Weight], kind: type[Int4Weight | Fp8Weight]) -> None:
    if not isinstance(experts, Experts) or not isinstance(experts.gate[0], kind):
        found = type(experts.gate[0]).__name__ if isinstance(experts, Experts) else type(experts).__name__
        raise TypeError(f"experts must be Experts of {kind.__name__}, got {found}")


def _checked(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Experts[Int4Weight] | Experts[Fp8Weight],
    out: Tensor | None,
) -> Tensor:
    """The tensor to write to."""
    check.matrix("hidden", hidden, torch.bfloat16)
    check.shape("hidden", hidden, None, experts.hidden_size)
    check.same_device("hidden", hidden, experts.gate[0].scale)
    check.tensor("topk_ids", topk_ids, torch.int32, torch.int64, dims=2)
    check.shape("topk_ids", topk_ids, hidden.shape[0], None)
    if topk_ids.shape[1] > MOST_CHOICES:
        raise ValueError(f"topk_ids must have at most {MOST_CHOICES} columns, got {topk_ids.shape[1]}")
    check.same_device("topk_ids", topk_ids, hidden)
    check.tensor("topk_weights", topk_weights, torch.float32)
    check.shape("topk_weights", topk_weights, *topk_ids.shape)
    check.same_device("topk_weights", topk_weights, hidden)
    inputs = (("hidden", hidden), ("topk_ids", topk_ids), ("topk_weights", topk_weights))
    result = check.output("out", out, hidden, tuple(hidden.shape), *inputs)
    if out is not None and result.numel():
        first, last = check.address_range(result)
        ranges = experts.ranges
        if bool(((ranges[:, 0] < last) & (first < ranges[:, 1])).any()):
            raise ValueError("out shares memory with experts")
    return result


def _run(
    function: Callable[..., None],
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Experts[Int4Weight] | Experts[Fp8Weight],
    out: Tensor,
) -> Tensor:
    if not topk_ids.numel() or not out.numel() or not experts.intermediate_size:
        return out.zero_()
    function(hidden, topk_ids, topk_weights, experts, out)
    return out
