"""Experts of csrc/matmul.h. Neither hidden ``[T, H]`` nor topk_ids ``[T, K]`` is empty."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from quantkit_kernels.forward import choice
from quantkit_kernels.forward.weights import Experts, Fp8Weight, Int4Weight

from .linear import NO_MEMORY, Format, format_of


class Call(Structure):
    """QkExperts of matmul.h."""

    _fields_ = (
        ("format", Format),
        ("pointers", c_void_p),
        ("strides", c_void_p),
        ("experts", c_int64),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("tokens", c_int64),
        ("top", c_int64),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("out", c_void_p),
    )


def moe_int4(
    hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts[Int4Weight], out: Tensor
) -> None:
    _moe(hidden, topk_ids, topk_weights, experts, out)


def moe_fp8(
    hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts[Fp8Weight], out: Tensor
) -> None:
    _moe(hidden, topk_ids, topk_weights, experts, out)


def _moe(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Experts[Int4Weight] | Experts[Fp8Weight],
    out: Tensor,
) -> None:
    ids = topk_ids.to(torch.int32).contiguous()
    weights = topk_weights.contiguous()
    call = Call(
        format_of(experts.gate[0]),
        experts.pointers.data_ptr(),
        experts.strides.data_ptr(),
        experts.num_experts,
        experts.hidden_size,
        experts.intermediate_size,
        hidden.data_ptr(),
        hidden.stride(0),
        *ids.shape,
        ids.data_ptr(),
        weights.data_ptr(),
        out.data_ptr(),
    )
    library = choice.library()
    library.declare({"qk_experts": (POINTER(Call), c_int)})
    if library.call("qk_experts", byref(call), torch.get_num_threads()) == NO_MEMORY:
        raise MemoryError(f"no memory for the activations of {ids.shape[0]} tokens")
