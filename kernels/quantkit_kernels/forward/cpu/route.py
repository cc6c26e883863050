"""``qk_route`` of csrc/route.cpp; nothing is empty."""

from __future__ import annotations

from ctypes import c_int64

from torch import Tensor

from .call import bits, make

Call = c_int64 * 14  # QkRoute


def route(
    logits: Tensor,
    is_softmax: bool,
    correction: Tensor | None,
    groups: int,
    topk_groups: int,
    normalizes: bool,
    epsilon: float,
    scaling: float,
    ids: Tensor,
    weights: Tensor,
) -> None:
    call = Call(
        logits.data_ptr(), logits.stride(0), *logits.shape,
        0 if correction is None else correction.data_ptr(), ids.shape[1], groups, topk_groups,
        is_softmax, normalizes, bits(epsilon), bits(scaling), ids.data_ptr(), weights.data_ptr(),
    )  # fmt: skip
    make("qk_route", call, logits, correction, ids, weights)
