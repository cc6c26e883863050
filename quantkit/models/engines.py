"""Whether an inference engine can load a view at a tensor-parallel size, and why not.

Used by ``plan`` (before the work) and ``verify`` (on what was written); needs only ``config.json``. The rules are
in ``engine_rules``. Left out: GPU architecture and kernel availability, expert parallelism, and vocabulary size
(engines pad it).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UsageError
from .config import text_shape
from .engine_rules import ENGINES, RULES, Facts, Level
from .linears import Linear, linears
from .quantization import Format, QuantizationMap, read_quantization

TENSOR_PARALLEL = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule's judgement; ``source`` is where the rule comes from."""

    level: Level
    rule: str
    message: str
    source: str


def check(
    config: Mapping[str, Any],
    quantization: Mapping[str, Any] | None,
    engine: str,
    tp: int,
    *,
    modules: Iterable[str] | None = None,
) -> list[Finding]:
    """Judge a view by its ``config.json`` and ``quantization_config`` (None: unquantized).

    Args:
        engine: one of ``ENGINES``.
        tp: tensor-parallel size.
        modules: names of the linear modules of the view, to check every layer and expert instead of one
            representative of each; of experts that are stored alike one per layer is enough.

    Returns:
        one finding per judgement, ``ok`` ones included, in the order of ``RULES``.

    Raises:
        UsageError: unknown engine, or tp < 1.
        SourceError: the config lacks a number the rules need.
    """
    if engine not in ENGINES:
        raise UsageError(f"unknown engine {engine!r}", accepted=", ".join(ENGINES))
    if tp < 1:
        raise UsageError(f"tensor-parallel size {tp} is not positive", accepted="1 or more")
    return _run(_facts(config, quantization, modules, engine, tp))


def check_all(
    config: Mapping[str, Any],
    quantization: Mapping[str, Any] | None,
    *,
    sizes: Iterable[int] = TENSOR_PARALLEL,
    modules: Iterable[str] | None = None,
) -> dict[str, dict[int, list[Finding]]]:
    """``check`` for every engine and tensor-parallel size: engine -> tp -> findings."""
    base = _facts(config, quantization, modules, ENGINES[0], 1)
    sizes = tuple(sizes)
    return {engine: {tp: _run(replace(base, engine=engine, tp=tp)) for tp in sizes} for engine in ENGINES}


def verdict(findings: Iterable[Finding]) -> Level:
    """The worst level of the findings."""
    levels = {f.level for f in findings}
    return next((level for level in (Level.NO, Level.WARN) if level in levels), Level.OK)


def _run(facts: Facts) -> list[Finding]:
    return [
        Finding(level, rule.name, message, rule.source)
        for rule in RULES
        if facts.engine in rule.engines
        for level, message in rule.judge(facts)
    ]


def _facts(
    config: Mapping[str, Any],
    quantization: Mapping[str, Any] | None,
    modules: Iterable[str] | None,
    engine: str,
    tp: int,
) -> Facts:
    quant, shape = read_quantization(quantization), text_shape(config)
    formats = [(linear, quant.format_of(linear.module)) for linear in linears(config)]
    routed = [(x, form) for x, form in formats if x.group in ("routed_expert", "mtp_expert")]
    by_place = {_place(x.module, shape.layers): x for x, _ in routed}
    known = {(_place(x.module, shape.layers), form) for x, form in routed}
    experts: dict[str, set[Format]] = defaultdict(set)
    for name in modules if modules is not None else [x.module for x in by_place.values()]:
        if ".experts." not in name:
            continue
        place, form = _place(name, shape.layers), quant.format_of(name)
        experts[name.rpartition(".")[0]].add(form)
        # An expert in a format that the representative does not have: only some layers may be quantized.
        if place in by_place and (place, form) not in known:
            known.add((place, form))
            formats.append((replace(by_place[place], module=name), form))
    formats += _other_layers(formats, quant, modules or (), shape.layers)
    frozen = {parent: frozenset(found) for parent, found in experts.items()}
    return Facts(config, shape, quant, tuple(formats), frozen, engine, tp)


def _other_layers(
    formats: Iterable[tuple[Linear, Format]], quant: QuantizationMap, modules: Iterable[str], layers: int
) -> list[tuple[Linear, Format]]:
    """Linears outside the routed experts, of the first layer in which a block is stored unlike any before.

    A block (``self_attn``, ``mlp.shared_experts``) comes whole, since engines merge some of its linears.
    """
    models: dict[str, dict[str, Linear]] = defaultdict(dict)
    known: dict[str, set[tuple[Format, ...]]] = defaultdict(set)
    first: dict[str, dict[str, Format]] = defaultdict(dict)
    for linear, form in formats:
        if linear.group in ("attention", "dense_mlp", "shared_expert"):
            block, leaf = _block(linear.module)
            models[block][leaf], first[block][leaf] = linear, form
    for block, found in first.items():
        known[block].add(tuple(found.values()))
    blocks: dict[str, set[str]] = defaultdict(set)  # of each layer: parent -> last names
    for name in modules:
        layer = _layer(name)
        if layer is not None and layer < layers and _block(name)[1] in models.get(_block(name)[0], ()):
            blocks[name.rpartition(".")[0]].add(_block(name)[1])
    added: list[tuple[Linear, Format]] = []
    for parent, leaves in blocks.items():
        alike = models[_block(f"{parent}.x")[0]]
        found = {leaf: quant.format_of(f"{parent}.{leaf}") for leaf in alike if leaf in leaves}
        signature = tuple(found.values())
        if len(found) < len(alike) or signature in known[_block(f"{parent}.x")[0]]:
            continue
        known[_block(f"{parent}.x")[0]].add(signature)
        for leaf, form in found.items():
            linear = alike[leaf]
            merged = linear.merged and f"{parent}.{linear.merged.rpartition('.')[2]}"
            added.append((replace(linear, module=f"{parent}.{leaf}", merged=merged), form))
    return added


def _block(module: str) -> tuple[str, str]:
    """What of a name lies between the layer's number and the last dot, and what comes after it."""
    block, _, leaf = module.partition(".layers.")[2].partition(".")[2].rpartition(".")
    return block, leaf


def _place(module: str, layers: int) -> tuple[str, bool]:
    """What experts of one shape share: the projection, and whether the layer is for multi-token prediction."""
    layer = _layer(module)
    return module.rpartition(".")[2], layer is not None and layer >= layers


def _layer(module: str) -> int | None:
    """The number of its layer; digits without end are no number, as in ``classify``."""
    digits = module.partition(".layers.")[2].partition(".")[0]
    return int(digits) if digits.isdecimal() and len(digits) < 10 else None
