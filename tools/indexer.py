"""Warm-up of the DSA indexers: KL divergence from the attention, averaged over heads, to the index scores.

The rest of the model is trained with dense attention and frozen here, as in the first stage that DeepSeek-V3.2's
report describes. Afterwards the published ``index_topk`` applies and contexts beyond it are really sparse.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def warm_up(model: Any, mtp: Any, batch: Callable[[], Tensor], *, minutes: float, max_steps: int | None) -> int:
    """Train the indexers of a GLM model and its MTP layer in place; returns the number of steps.

    Args:
        batch: makes token ids ``[B, S+2]``.
        minutes: stop after this time.
        max_steps: stop after so many steps; None for no such limit.
    """
    set_attention(model, mtp, "eager")  # only eager attention returns its probabilities
    layers = [*model.model.layers, mtp.layer]
    attentions = [layer.self_attn for layer in layers if layer.self_attn.indexer is not None]
    parameters = [p for m in attentions for p in m.indexer.parameters()]
    for p in [*model.parameters(), *mtp.parameters()]:
        p.requires_grad_(False)
    for p in parameters:
        p.requires_grad_(True)
    inputs: dict[int, Any] = {}
    probabilities: dict[int, Tensor] = {}
    hooks = []
    for i, m in enumerate(attentions):
        hooks.append(m.indexer.register_forward_pre_hook(lambda _, args, i=i: inputs.__setitem__(i, args)))
        hooks.append(m.register_forward_hook(lambda _, args, out, i=i: probabilities.__setitem__(i, out[1])))
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)
    start, step = time.monotonic(), 0
    while time.monotonic() - start < minutes * 60 and step != max_steps:
        with torch.no_grad():
            reference_forward(model, mtp, batch())
        kl = torch.stack([_divergence(m.indexer, inputs[i], probabilities[i]) for i, m in enumerate(attentions)])
        kl.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            print(f"indexer {step} KL {kl.mean().item():.4f}", flush=True)
        step += 1
    for hook in hooks:
        hook.remove()
    set_attention(model, mtp, "sdpa")
    return step


def set_attention(model: Any, mtp: Any, implementation: str) -> None:
    model.config._attn_implementation = implementation
    mtp.layer.self_attn.config._attn_implementation = implementation


def reference_forward(model: Any, mtp: Any, x: Tensor) -> None:
    """Run transformers' own modules on ``x[B, S+2]``, the MTP layer included, for what their hooks see."""
    s = x.shape[1] - 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h_BSH = model.model(x[:, :s]).last_hidden_state
        e_BSH = model.model.embed_tokens(x[:, 1 : s + 1])
        z_BSH = mtp.eh_proj(torch.cat([mtp.enorm(e_BSH), mtp.hnorm(h_BSH)], -1))
        position = torch.arange(s)[None]
        causal = torch.full((s, s), torch.finfo(torch.float32).min).triu(1)
        mtp.layer(
            z_BSH,
            attention_mask=causal[None, None].expand(x.shape[0], 1, s, s),
            position_embeddings=model.model.rotary_emb(z_BSH, position_ids=position),
            position_ids=position,
        )


def _divergence(indexer: Any, args: Any, attention: Tensor) -> Tensor:
    """KL(attention averaged over heads || softmax of the index scores), mean over positions."""
    scores_BSS = _scores(indexer, args)
    s = scores_BSS.shape[-1]
    causal = torch.full((s, s), float("-inf")).triu(1)
    log_q = (scores_BSS + causal).log_softmax(-1).clamp_min(-30)
    p = attention.float().mean(1)
    p = p / p.sum(-1, keepdim=True)
    return F.kl_div(log_q, p, reduction="batchmean") / s


def _scores(indexer: Any, args: Any) -> Tensor:
    """The indexer's scores ``[B, S, S]`` with gradients; transformers' forward returns only the chosen indices."""
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave

    x, q_latent, (cos, sin) = args[:3]
    b, s, _ = x.shape
    rope = indexer.qk_rope_head_dim
    q = indexer.wq_b(q_latent).view(b, s, indexer.n_heads, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(x)).unsqueeze(2)
    q_rope, k_rope = apply_rotary_pos_emb_interleave(q[..., :rope], k[..., :rope], cos, sin, unsqueeze_dim=2)
    q = torch.cat([q_rope, q[..., rope:]], -1)
    k = torch.cat([k_rope, k[..., rope:]], -1).squeeze(2)
    per_head = F.relu(torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)) * indexer.softmax_scale)
    weight = indexer.weights_proj(x).float() * indexer.n_heads**-0.5
    scores: Tensor = torch.matmul(weight.unsqueeze(-2), per_head).squeeze(-2)
    return scores
