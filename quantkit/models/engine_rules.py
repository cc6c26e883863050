"""The loading rules of inference engines, one function each, with the source it was read in.

A rule looks at ``Facts`` and yields ``(level, message)``; nothing when it does not apply. Engines find these
things out at load time, after minutes of reading, with a bare assert or a kernel error; everything here is known
from ``config.json``. ``engines`` runs them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .config import TextShape, text_config
from .linears import Cut, Linear
from .quantization import PLAIN, Format, QuantizationMap

ENGINES = ("vllm", "sglang", "transformers")

_VLLM = "vLLM"
_MARLIN = "vLLM and SGLang marlin_utils.check_moe_marlin_supports_layer"
_BLOCK = "vLLM and SGLang fp8_utils.validate_fp8_block_shape; vLLM #17569, #25292, #54178"


class Level(str, Enum):
    """How a rule judged."""

    OK = "ok"
    WARN = "warn"
    NO = "no"


Judgement = tuple[Level, str]


@dataclass(frozen=True)
class Facts:
    """What a rule may look at: the model's numbers, the formats of its linears, and ``tp``.

    ``experts``: per expert, the formats of its projections; of every expert when the view's module names were
    given, else of one representative.
    """

    config: Mapping[str, Any]
    shape: TextShape
    quantization: QuantizationMap
    linears: tuple[tuple[Linear, Format], ...]
    experts: Mapping[str, frozenset[Format]]
    engine: str
    tp: int

    def stored(self, kind: str, *groups: str) -> list[tuple[Linear, Format]]:
        """Linears of a format kind in these groups, one per shape."""
        seen: dict[tuple[Any, ...], tuple[Linear, Format]] = {}
        for linear, form in self.linears:
            if form.kind == kind and linear.group in groups:
                seen.setdefault((linear.out_features, linear.in_features, linear.cut, form), (linear, form))
        return list(seen.values())


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule, the engines it holds for and where it is written."""

    name: str
    engines: tuple[str, ...]
    source: str
    judge: Callable[[Facts], Iterable[Judgement]]


def _heads(f: Facts) -> Iterator[Judgement]:
    fits = f.shape.heads % f.tp == 0
    word = "divided by" if fits else "not divisible by"
    yield (Level.OK if fits else Level.NO), f"{f.shape.heads} attention heads {word} TP {f.tp}"


def _kv_heads(f: Facts) -> Iterator[Judgement]:
    if f.shape.mla is not None:
        return
    heads = f.shape.kv_heads
    fits = heads % f.tp == 0 or f.tp % heads == 0
    yield (Level.OK if fits else Level.NO), f"{heads} KV heads {'fit' if fits else 'do not fit'} TP {f.tp}"


def _formats(f: Facts) -> Iterator[Judgement]:
    for form in sorted({form.detail for _, form in f.linears if form.kind == "other"}):
        yield Level.NO, f"weights are stored in a format quantkit has no rules for: {form}"


def _int4_group(f: Facts) -> Iterator[Judgement]:
    sizes = {form.group_size for _, form in f.linears if form.kind == "int4"}
    for size in sorted(sizes):
        fits = size in (-1, 32, 64, 128)
        yield (Level.OK if fits else Level.NO), f"INT4 group size {size}; the kernels take 32, 64, 128 or -1"


def _int4_experts(f: Facts) -> Iterator[Judgement]:
    for linear, form in f.stored("int4", "routed_expert", "mtp_expert"):
        if linear.cut is not Cut.IN:
            continue  # rows of gate and up are the columns of down: one message is enough
        what = f"expert width {linear.in_features} / TP {f.tp}"
        group = max(form.group_size, 1)
        width = linear.in_features // f.tp
        need = max(64, form.group_size)
        if linear.in_features % (f.tp * group):
            yield Level.NO, f"{what} is not a multiple of the group size {form.group_size}"
        elif width % need or linear.out_features % 128:
            why = (
                f"{what} = {width} is not a multiple of {need}"
                if width % need
                else f"hidden size {linear.out_features} is not a multiple of 128"
            )
            if f.engine == "vllm":
                yield Level.WARN, f"{why}: no Marlin kernel, vLLM falls back to its slower Triton WNA16 kernel"
            else:
                yield Level.NO, f"{why}, which its only INT4 expert kernel (Marlin) needs"
        else:
            yield (
                Level.OK,
                f"{what} = {width} is a multiple of {need}, hidden {linear.out_features} of 128 (Marlin)",
            )


def _int4_linears(f: Facts) -> Iterator[Judgement]:
    for linear, form in f.stored("int4", "attention", "dense_mlp", "shared_expert"):
        name = linear.module.rpartition(".")[2]
        local = linear.per_gpu(f.tp)
        if local is None or local[1] % max(form.group_size, 1):
            yield (
                Level.NO,
                f"{name} [{linear.out_features}, {linear.in_features}] cannot be cut by TP {f.tp} in {form}",
            )
        elif local[0] % 64 or local[1] % 128:
            yield (
                Level.WARN,
                f"{name} is {list(local)} per GPU: Marlin needs multiples of [64, 128], a slower kernel runs",
            )


def _fp8_experts(f: Facts) -> Iterator[Judgement]:
    routed = f.stored("fp8-block", "routed_expert")
    said = {(linear.in_features, form) for linear, form in routed}
    extra = [x for x in f.stored("fp8-block", "mtp_expert") if (x[0].in_features, x[1]) not in said]
    for linear, form in [*routed, *extra]:
        if linear.cut is not Cut.IN:
            continue
        width, rest = divmod(linear.in_features, f.tp)
        fits = rest == 0 and width % form.block[1] == 0
        what = f"expert width {linear.in_features} / TP {f.tp}"
        if fits:
            yield Level.OK, f"{what} = {width} is a multiple of the FP8 block {form.block[1]}"
        elif linear.group == "routed_expert":
            yield Level.NO, f"{what} is not a multiple of the FP8 block {form.block[1]}"
        else:
            yield (
                Level.WARN,
                (
                    f"{what} is not a multiple of the FP8 block {form.block[1]}: no speculative decoding with the "
                    f"FP8 multi-token-prediction layer"
                ),
            )


def _fp8_linears(f: Facts) -> Iterator[Judgement]:
    bad = []
    for linear, form in f.stored("fp8-block", "attention", "dense_mlp", "shared_expert"):
        local = linear.per_gpu(f.tp)
        name = linear.module.rpartition(".layers.")[2].partition(".")[2]
        if local is None:
            bad.append(f"{name} [{linear.out_features}, {linear.in_features}] cannot be cut by TP {f.tp}")
        elif linear.cut is Cut.IN and f.tp > 1 and local[1] % form.block[1]:
            bad.append(f"{name} has {local[1]} columns per GPU")
        elif linear.cut in (Cut.OUT, Cut.KV) and (f.tp > 1 or linear.merged) and local[0] % form.block[0]:
            bad.append(f"{name} has {local[0]} rows per GPU")
    if bad:
        yield Level.NO, f"not a multiple of the FP8 block at TP {f.tp}: {'; '.join(bad)}"
    elif f.stored("fp8-block", "attention", "dense_mlp", "shared_expert"):
        yield Level.OK, f"FP8 linears outside the experts can be cut by TP {f.tp} along whole blocks"


def _one_scheme(f: Facts) -> Iterator[Judgement]:
    mixed = sorted(parent for parent, forms in f.experts.items() if len(forms) > 1)
    layers: dict[str, set[Format]] = defaultdict(set)
    for parent, forms in f.experts.items():
        layers[_layer_of(parent)] |= forms
    split = sorted(layer for layer, found in layers.items() if len(found) > 1)
    if mixed:
        said = ", ".join(sorted(map(str, f.experts[mixed[0]])))
        yield (
            Level.NO,
            f"projections of one expert differ ({said}), in {len({_layer_of(parent) for parent in mixed})} of "
            f"{len(layers)} layers: {mixed[0]}",
        )
    elif split:
        said = ", ".join(sorted(map(str, layers[split[0]])))
        yield (
            Level.NO,
            f"experts of one layer differ ({said}), in {len(split)} of {len(layers)} layers: {split[0]}",
        )
    elif f.experts:
        yield Level.OK, "all experts of a layer share one format"


def _layer_of(expert: str) -> str:
    return expert.rpartition(".experts.")[0]


def _merged(f: Facts) -> Iterator[Judgement]:
    parts: dict[str, dict[str, Format]] = defaultdict(dict)
    for linear, form in f.linears:
        if linear.merged and linear.group in ("attention", "dense_mlp", "shared_expert"):
            parts[linear.merged][linear.module.rpartition(".")[2]] = form
    for forms in parts.values():
        if len(set(forms.values())) > 1:
            said = ", ".join(f"{name} {form}" for name, form in forms.items())
            yield Level.NO, f"the engine merges these into one matrix, but their formats differ: {said}"


def _linear_target(f: Facts) -> Iterator[Judgement]:
    if f.quantization.method == "compressed-tensors" and "Linear" not in f.quantization.targets:
        yield Level.WARN, 'no group targets "Linear": older vLLM builds refuse that'


def _int4_symmetric(f: Facts) -> Iterator[Judgement]:
    for _, form in f.stored("int4", "routed_expert"):
        if not form.symmetric:
            yield Level.NO, "INT4 experts are asymmetric; SGLang loads symmetric ones only"
        if form.actorder is not None:
            yield Level.NO, f"actorder is {form.actorder!r}; SGLang then loads the down projection unsharded"


def _mixed_sglang(f: Facts) -> Iterator[Judgement]:
    if f.quantization.method != "compressed-tensors" or not f.quantization.is_mixed:
        return
    yield Level.WARN, "INT4 experts beside FP8 need SGLang with PR #37207 (mixed-precision compressed-tensors)"
    forms = {
        group: {form for x, form in f.linears if x.group == group} for group in ("shared_expert", "routed_expert")
    }
    if forms["shared_expert"] - forms["routed_expert"]:
        yield (
            Level.WARN,
            "start SGLang with --disable-shared-experts-fusion: shared experts are stored in another format",
        )
    if f.shape.indexer is not None:
        yield Level.WARN, "the DSA indexer looks for weight_scale_inv, the view has weight_scale: needs PR #37207"


def _transformers_type(f: Facts) -> Iterator[Judgement]:
    if f.config.get("model_type") == "kimi_k2":
        known = bool(text_config(f.config).get("auto_map"))
        how = "trust_remote_code loads the publisher's code" if known else 'set model_type to "deepseek_v3"'
        yield Level.WARN, f"transformers 5.17 does not know model_type kimi_k2: {how}"


def _transformers_blocks(f: Facts) -> Iterator[Judgement]:
    if f.quantization.method != "fp8":
        return
    partial = [x for x, form in f.linears if form.kind == "fp8-block" and x.out_features % form.block[0]]
    if partial:
        names = ", ".join(sorted({x.module.rpartition(".")[2] for x in partial}))
        yield (
            Level.WARN,
            (
                f"on CPU transformers 5.17 takes the block size from shapes, and {names} ends in a partial block: "
                f"it refuses or computes wrong weights; use a BF16 copy made by quantkit there"
            ),
        )


def _transformers_experts(f: Facts) -> Iterator[Judgement]:
    if f.quantization.method != "compressed-tensors":
        return
    scheme = _transformers_scheme(f.quantization)
    for linear, form in f.linears:
        if linear.group == "routed_expert" and form != scheme:
            layer = linear.module.partition(".layers.")[2].partition(".")[0]
            yield (
                Level.NO,
                f"transformers 5.17 reads all routed experts as {scheme}; those of layer {layer} are {form}: "
                f"it refuses or leaves them uninitialized",
            )
            return


def _transformers_scheme(quantization: QuantizationMap) -> Format:
    """The one format in which transformers reads the experts that it merges (``get_experts_scheme``)."""
    groups = quantization.groups
    named = [form for targets, form in groups if any(t.startswith("re:") and "experts" in t for t in targets)]
    classes = [form for targets, form in groups if any(not t.startswith("re:") for t in targets)]
    return next(iter([*named, *classes, *(form for _, form in groups)]), PLAIN)


def _transformers_tp(f: Facts) -> Iterator[Judgement]:
    if f.tp > 1:
        yield Level.WARN, f"transformers at TP {f.tp} has not been checked; at TP 1 it has"
    elif f.quantization.method == "compressed-tensors":
        yield Level.OK, "compressed-tensors decompresses INT4 weights at load"


_BOTH = ("vllm", "sglang")
RULES: tuple[Rule, ...] = (
    Rule("heads", _BOTH, "vLLM and SGLang attention layers: num_heads % tp_size == 0", _heads),
    Rule("kv-heads", _BOTH, "vLLM and SGLang attention layers: total_num_kv_heads against tp_size", _kv_heads),
    Rule("known-format", ENGINES, "quantkit", _formats),
    Rule("int4-group-size", _BOTH, f"{_MARLIN}: group_size in [-1, 32, 64, 128]", _int4_group),
    Rule("int4-experts", _BOTH, f"{_MARLIN}: hidden % 128, width % max(64, group)", _int4_experts),
    Rule("int4-linears", _BOTH, "vLLM and SGLang marlin_utils.verify_marlin_supports_shape", _int4_linears),
    Rule("fp8-experts", _BOTH, _BLOCK, _fp8_experts),
    Rule("fp8-linears", _BOTH, _BLOCK, _fp8_linears),
    Rule("expert-one-format", _BOTH, "vLLM compressed_tensors_moe: one scheme per fused layer", _one_scheme),
    Rule("merged-one-format", _BOTH, f"{_VLLM} compressed_tensors.utils: fused modules share a scheme", _merged),
    Rule("linear-target", ("vllm",), "llm-compressor #2163", _linear_target),
    Rule("int4-symmetric", ("sglang",), "SGLang compressed_tensors_moe WNA16", _int4_symmetric),
    Rule("mixed-precision", ("sglang",), "SGLang PR #37207", _mixed_sglang),
    Rule("model-type", ("transformers",), "transformers 5.17 models/auto", _transformers_type),
    Rule("partial-blocks", ("transformers",), "transformers 5.17 on CPU, observed", _transformers_blocks),
    Rule(
        "experts-one-format",
        ("transformers",),
        "transformers 5.17 integrations/compressed_tensors.get_experts_scheme, observed",
        _transformers_experts,
    ),
    Rule("tensor-parallel", ("transformers",), "observed with compressed-tensors 0.19", _transformers_tp),
)
