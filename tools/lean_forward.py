"""A forward pass for training on a CPU: the same mathematics as transformers' modules, about twice as fast.

BF16 arithmetic on float32 master weights; attention is dense (the DSA indexers are trained afterwards, see
``indexer.py``); experts run once per expert on the tokens routed to them. A smoke test compares it with
transformers.

Legend: B batch, S positions, H hidden, T = B*S tokens, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

BF16 = torch.bfloat16
Tensor = torch.Tensor


@dataclass
class Routing:
    """What the routers did in one forward pass: tokens per expert (sigmoid routers), balance losses (softmax)."""

    counts: dict[Any, Tensor] = field(default_factory=dict)
    balance: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of the rotary embedding, ``[S, rotary dims / 2]``."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, inv_freq: Tensor, positions: int) -> Rotary:
        angle = torch.arange(positions)[:, None].float() * inv_freq[None]
        return cls(angle.cos().to(BF16), angle.sin().to(BF16))

    def interleaved(self, x: Tensor) -> Tensor:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)

    def halves(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)


def linear(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.weight.to(BF16))


def rms_norm(module: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), module.weight.to(x.dtype), module.variance_epsilon)


def mla(m: Any, x_BSH: Tensor, rotary: Rotary) -> Tensor:
    """Multi-head latent attention, dense."""
    b, s, _ = x_BSH.shape
    nope, rope, v_dim, rank = m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim, m.kv_lora_rank
    q = linear(m.q_b_proj, rms_norm(m.q_a_layernorm, linear(m.q_a_proj, x_BSH)))
    q = q.view(b, s, -1, nope + rope).transpose(1, 2)
    latent = linear(m.kv_a_proj_with_mqa, x_BSH)
    kv = linear(m.kv_b_proj, rms_norm(m.kv_a_layernorm, latent[..., :rank]))
    kv = kv.view(b, s, -1, nope + v_dim).transpose(1, 2)
    k_rope = rotary.interleaved(latent[..., rank:].unsqueeze(1)).expand(-1, kv.shape[1], -1, -1)
    q = torch.cat([q[..., :nope], rotary.interleaved(q[..., nope:])], -1)
    k = torch.cat([kv[..., :nope], k_rope], -1)
    v = F.pad(kv[..., nope:], (0, nope + rope - v_dim))  # equal head sizes let the fused kernel run
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=m.scaling)[..., :v_dim]
    return linear(m.o_proj, out.transpose(1, 2).reshape(b, s, -1))


def gqa(m: Any, x_BSH: Tensor, rotary: Rotary) -> Tensor:
    """Grouped-query attention with q and k norms."""
    b, s, _ = x_BSH.shape
    q = rms_norm(m.q_norm, linear(m.q_proj, x_BSH).view(b, s, -1, m.head_dim)).transpose(1, 2)
    k = rms_norm(m.k_norm, linear(m.k_proj, x_BSH).view(b, s, -1, m.head_dim)).transpose(1, 2)
    v = linear(m.v_proj, x_BSH).view(b, s, -1, m.head_dim).transpose(1, 2)
    q, k = rotary.halves(q), rotary.halves(k)
    repeat = q.shape[1] // k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1), is_causal=True
    )
    return linear(m.o_proj, out.transpose(1, 2).reshape(b, s, -1))


def swiglu(m: Any, x: Tensor) -> Tensor:
    return linear(m.down_proj, F.silu(linear(m.gate_proj, x)) * linear(m.up_proj, x))


def route(gate: Any, x_TH: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Weights and indices ``[T, K]`` of the chosen experts; sigmoid with correction bias, or softmax."""
    logits = x_TH.float() @ gate.weight.T
    num_experts = logits.shape[1]
    if hasattr(gate, "e_score_correction_bias"):
        score = logits.sigmoid()
        index = (score + gate.e_score_correction_bias).topk(gate.top_k, -1).indices
        weight = score.gather(1, index)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * gate.routed_scaling_factor
        routing.counts[gate] = torch.bincount(index.reshape(-1), minlength=num_experts).float()
    else:
        probability = logits.softmax(-1)
        weight, index = probability.topk(gate.top_k, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        share = torch.bincount(index.reshape(-1), minlength=num_experts).float() / index.numel()
        routing.balance.append((share * probability.mean(0)).sum() * num_experts)
    return weight, index


def moe(m: Any, x_BSH: Tensor, routing: Routing) -> Tensor:
    b, s, h = x_BSH.shape
    x_TH = x_BSH.reshape(-1, h)
    weight_TK, index_TK = route(m.gate, x_TH, routing)
    k, flat = index_TK.shape[1], index_TK.reshape(-1)
    order = flat.argsort()  # (token, choice) pairs sorted by expert
    counts = torch.bincount(flat, minlength=m.gate.weight.shape[0]).tolist()
    per_expert = torch.split(x_TH[order // k], counts)
    outputs = []
    for tokens, gate_up, down in zip(
        per_expert, m.experts.gate_up_proj.to(BF16).unbind(0), m.experts.down_proj.to(BF16).unbind(0), strict=True
    ):
        gate, up = F.linear(tokens, gate_up).chunk(2, -1)
        outputs.append(F.linear(F.silu(gate) * up, down))
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    y_TH = (torch.cat(outputs)[back].view(-1, k, h) * weight_TK.to(BF16).unsqueeze(-1)).sum(1)
    if getattr(m, "shared_experts", None) is not None:
        y_TH = y_TH + swiglu(m.shared_experts, x_TH)
    return y_TH.view(b, s, h)


def decoder_layer(layer: Any, x_BSH: Tensor, rotary: Rotary, routing: Routing) -> Tensor:
    attention = mla if hasattr(layer.self_attn, "kv_b_proj") else gqa
    x_BSH = x_BSH + attention(layer.self_attn, rms_norm(layer.input_layernorm, x_BSH), rotary)
    z_BSH = rms_norm(layer.post_attention_layernorm, x_BSH)
    return x_BSH + (moe(layer.mlp, z_BSH, routing) if hasattr(layer.mlp, "experts") else swiglu(layer.mlp, z_BSH))


def losses(model: Any, mtp: Any, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Next-token loss of ``x[B, S+2]``, and the MTP loss (with ``mtp``) or the balance loss (softmax routers)."""
    s, trunk, head = x.shape[1] - 2, model.model, model.lm_head
    rotary = Rotary.of(trunk.rotary_emb.inv_freq, s)
    h_BSH = F.embedding(x[:, :s], trunk.embed_tokens.weight).to(BF16)
    for layer in trunk.layers:
        h_BSH = decoder_layer(layer, h_BSH, rotary, routing)
    h_BSH = rms_norm(trunk.norm, h_BSH)
    loss = F.cross_entropy(linear(head, h_BSH).float().flatten(0, 1), x[:, 1 : s + 1].flatten())
    if mtp is not None:
        e_BSH = F.embedding(x[:, 1 : s + 1], trunk.embed_tokens.weight).to(BF16)
        z_BSH = linear(mtp.eh_proj, torch.cat([rms_norm(mtp.enorm, e_BSH), rms_norm(mtp.hnorm, h_BSH)], -1))
        z_BSH = rms_norm(mtp.norm, decoder_layer(mtp.layer, z_BSH, rotary, routing))
        return loss, F.cross_entropy(linear(head, z_BSH).float().flatten(0, 1), x[:, 2 : s + 2].flatten())
    return loss, torch.stack(routing.balance).mean() if routing.balance else torch.zeros(())
