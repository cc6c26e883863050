"""Experts in float32 torch, one after the other. Neither hidden ``[T, H]`` nor topk_ids ``[T, K]`` is empty."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit_kernels.forward.check import expert_ids
from quantkit_kernels.forward.weights import Experts, Fp8Weight, Int4Weight

from .linear import product


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
    if topk_ids.device.type == "cpu":
        expert_ids("topk_ids", topk_ids, experts.num_experts)
    total = torch.zeros_like(out, dtype=torch.float32)
    for expert in sorted(set(topk_ids.flatten().tolist())):
        if not 0 <= expert < experts.num_experts:
            continue
        tokens, places = torch.where(topk_ids == expert)
        x = hidden[tokens].float()
        gate = product(x, experts.gate[expert])
        up = product(x, experts.up[expert])
        h = (torch.nn.functional.silu(gate) * up).bfloat16().float()
        share = product(h, experts.down[expert]) * topk_weights[tokens, places].unsqueeze(1)
        total.index_add_(0, tokens, share)
    out.copy_(total)
