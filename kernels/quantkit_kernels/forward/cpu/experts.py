"""Experts of csrc/matmul.h. Neither hidden ``[T, H]`` nor topk_ids ``[T, K]`` is empty; ids may be wrong."""

from __future__ import annotations

from ctypes import c_int64

import torch
from torch import Tensor

from quantkit_kernels.forward.check import expert_ids
from quantkit_kernels.forward.weights import Experts, Fp8Weight, Int4Weight

from .call import fail, status_of

Call = c_int64 * 20  # QkExperts of matmul.h: numbers and addresses of eight bytes each
BAD_ID = 5


def moe_int4(
    hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts[Int4Weight], out: Tensor
) -> None:
    _moe(1, hidden, topk_ids, topk_weights, experts, out)


def moe_fp8(
    hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts[Fp8Weight], out: Tensor
) -> None:
    _moe(0, hidden, topk_ids, topk_weights, experts, out)


def _moe(
    is_int4: int,
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Experts[Int4Weight] | Experts[Fp8Weight],
    out: Tensor,
) -> None:
    call = Call(
        is_int4,
        *experts.address,
        experts.num_experts,
        experts.hidden_size,
        experts.intermediate_size,
        hidden.data_ptr(),
        hidden.stride(0),
        *topk_ids.shape,
        topk_ids.dtype is torch.int64,
        topk_ids.data_ptr(),
        *topk_ids.stride(),
        topk_weights.data_ptr(),
        *topk_weights.stride(),
        out.data_ptr(),
    )
    status = status_of("qk_experts", call, hidden, topk_ids, topk_weights, experts, out)
    if status == BAD_ID:
        expert_ids("topk_ids", topk_ids, experts.num_experts)
    if status:
        fail("qk_experts", status)
