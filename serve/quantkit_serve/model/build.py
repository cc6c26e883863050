"""A decoder from its specification and weights: which tensor goes where, by the names of the family table."""

from __future__ import annotations

from quantkit.errors import UnsupportedError
from quantkit.models.families import FAMILIES, Family

from .attention import Attention
from .decoder import Decoder, Layer
from .experts import FeedForward, MixtureOfExperts, Router, SwiGlu
from .gqa import GqaAttention
from .loader import LoadedWeights, Scope
from .mla import LatentAttention
from .norm import RmsNorm
from .ops import Ops
from .spec import ModelSpec
from .weights import Dual, ExpertSet, Stored


def build_decoder(spec: ModelSpec, weights: LoadedWeights, ops: Ops) -> Decoder:
    """
    Raises:
        SourceError: a tensor is missing, or one is there that has no place.
        UnsupportedError: a format or kind that can't be run.
    """
    family = next(f for f in FAMILIES if f.name == spec.family)
    prefix = family.prefix
    embedding = f"{prefix}model.embed_tokens"
    # An embedding is plain in all formats: its rows are looked up.
    head = _plain(weights, embedding if spec.ties_embeddings else f"{prefix}lm_head")
    decoder = Decoder(
        embedding=weights.tensor(f"{embedding}.weight"),
        layers=[
            _layer(spec, family, weights.below(f"{prefix}model.layers.{number}"), number, ops)
            for number in range(spec.shape.layers)
        ],
        norm=RmsNorm(weights.tensor(f"{prefix}model.norm.weight"), spec.norm_eps, ops.dtype),
        head=head,
        ops=ops,
    )
    weights.refuse_strangers()
    return decoder


def _layer(spec: ModelSpec, family: Family, weights: Scope, number: int, ops: Ops) -> Layer:
    before, behind = (
        RmsNorm(weights.tensor(f"{name}.weight"), spec.norm_eps, ops.dtype)
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    attention = _attention(spec, weights.below("self_attn"), number, ops)
    return Layer(before, attention, behind, _feed_forward(spec, family, weights, number, ops))


def _attention(spec: ModelSpec, weights: Scope, number: int, ops: Ops) -> Attention:
    if spec.shape.mla is None:
        return GqaAttention(spec, weights, ops)
    return LatentAttention(spec.text, weights, number, ops)


def _feed_forward(spec: ModelSpec, family: Family, weights: Scope, number: int, ops: Ops) -> FeedForward:
    block = weights.below(family.expert_paths[0])
    names = {role: name for name, role in family.projections.items()}
    if not spec.is_sparse[number]:
        return _swiglu(block, names, ops)
    has_shared = spec.shape.shared_experts > 0
    shared = _swiglu(block.below("shared_experts"), names, ops) if has_shared else None
    correction = next(
        (block.tensor(n) for n in ("gate.e_score_correction_bias", "e_score_correction_bias") if block.has(n)),
        None,
    )
    router = Router(spec.router, _plain(block, "gate"), correction, ops)
    paths = [f"{expert}." for expert in range(spec.shape.experts)]
    return MixtureOfExperts(router, _experts(block.below("experts"), paths, names), shared, ops)


def _experts(weights: Scope, paths: list[str], names: dict[str, str]) -> Dual[ExpertSet]:
    found = [[_plain(weights, f"{path}{names[part]}") for path in paths] for part in ("gate", "up", "down")]
    prefill = ExpertSet(*([dual.prefill for dual in part] for part in found))
    if all(dual.prefill is dual.decode for part in found for dual in part):
        return Dual(prefill, prefill)
    return Dual(prefill, ExpertSet(*([dual.decode for dual in part] for part in found)))


def _swiglu(weights: Scope, names: dict[str, str], ops: Ops) -> SwiGlu:
    return SwiGlu(_experts(weights, [""], names), ops)


def _plain(weights: LoadedWeights | Scope, name: str) -> Dual[Stored]:
    """A linear that has no bias in any family."""
    found = weights.linear(name)
    if found.prefill.bias is not None:
        raise UnsupportedError("a bias", where=name, accepted="a linear without one")
    return Dual(found.prefill.weight, found.decode.weight)
