"""A decoder and its prediction layer from specification and weights: which tensor goes where, by the names of the
family table."""

from __future__ import annotations

from quantkit.errors import UnsupportedError, UsageError
from quantkit.models.families import FAMILIES, Family

from .attention import Attention
from .decoder import Decoder, Layer
from .experts import FeedForward, MixtureOfExperts, Router, SwiGlu
from .gqa import GqaAttention
from .loader import LoadedWeights, Scope
from .mla import LatentAttention
from .norm import RmsNorm
from .ops import Ops
from .prediction import PredictionLayer
from .spec import ModelSpec
from .weights import Dual, ExpertSet, Linear, Stored


def build_decoder(spec: ModelSpec, weights: LoadedWeights, ops: Ops) -> Decoder:
    """
    Raises:
        SourceError: a tensor is missing.
        UnsupportedError: a format or kind that can't be run.
    """
    family = _family(spec)
    prefix = family.prefix
    embedding = f"{prefix}model.embed_tokens"
    # An embedding is plain in all formats: its rows are looked up.
    head = _plain(weights, embedding if spec.ties_embeddings else f"{prefix}lm_head")
    return Decoder(
        embedding=weights.tensor(f"{embedding}.weight"),
        layers=[
            _layer(
                spec,
                family,
                weights.below(f"{prefix}model.layers.{number}"),
                number,
                ops,
                is_sparse=spec.is_sparse[number],
            )
            for number in range(spec.shape.layers)
        ],
        norm=RmsNorm(weights.tensor(f"{prefix}model.norm.weight"), spec.norm_eps, ops.dtype),
        head=head,
        ops=ops,
    )


def build_prediction(spec: ModelSpec, weights: LoadedWeights, decoder: Decoder) -> PredictionLayer:
    """The first multi-token-prediction layer, behind the decoder's; weights of the decode view alone.

    Raises:
        UsageError: the model has none.
        SourceError, UnsupportedError: as ``build_decoder``.
    """
    family, number, ops = _family(spec), spec.shape.layers, decoder.ops
    own = weights.of_prediction(f"{family.prefix}model.layers.{number}", number)
    if not own.has("enorm.weight"):
        raise UsageError(
            "the model has no multi-token-prediction layer", where="--speculative", accepted="off",
            hint="GLM-4.5 and later, DeepSeek-V3 and its successors are published with one.",
        )  # fmt: skip

    def norm(name: str) -> RmsNorm:
        return RmsNorm(own.tensor(f"{name}.weight"), spec.norm_eps, ops.dtype)

    head = "shared_head.head"
    has_head, has_embedding = own.has(f"{head}.weight"), own.has("embed_tokens.weight")
    is_sparse = own.below(family.expert_paths[0]).has("gate.weight")
    return PredictionLayer(
        embedding=own.tensor("embed_tokens.weight") if has_embedding else decoder.embedding,
        embedding_norm=norm("enorm"),
        hidden_norm=norm("hnorm"),
        entry=Linear(_plain(own, "eh_proj").decode),
        layer=_layer(spec, family, own, number, ops, is_sparse=is_sparse),
        norm=norm("shared_head.norm"),
        head=(_plain(own, head) if has_head else decoder.head).decode,
        ops=ops,
    )


def _family(spec: ModelSpec) -> Family:
    return next(f for f in FAMILIES if f.name == spec.family)


def _layer(spec: ModelSpec, family: Family, weights: Scope, number: int, ops: Ops, *, is_sparse: bool) -> Layer:
    before, behind = (
        RmsNorm(weights.tensor(f"{name}.weight"), spec.norm_eps, ops.dtype)
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    attention = _attention(spec, weights.below("self_attn"), number, ops)
    block = weights.below(family.expert_paths[0])
    feed_forward = _feed_forward(spec, family, block, ops, is_sparse=is_sparse)
    return Layer(before, attention, behind, feed_forward, ops)


def _attention(spec: ModelSpec, weights: Scope, number: int, ops: Ops) -> Attention:
    if spec.shape.mla is None:
        return GqaAttention(spec, weights, ops)
    return LatentAttention(spec.text, weights, number, ops)


def _feed_forward(spec: ModelSpec, family: Family, block: Scope, ops: Ops, *, is_sparse: bool) -> FeedForward:
    names = {role: name for name, role in family.projections.items()}
    if not is_sparse:
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
