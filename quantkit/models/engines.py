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
from .linears import linears
from .quantization import Format, read_quantization

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
        modules: names of all linear modules of the view, to check every expert instead of one representative.

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
    quant = read_quantization(quantization)
    representative = linears(config)
    formats = tuple((linear, quant.format_of(linear.module)) for linear in representative)
    names = modules if modules is not None else (x.module for x in representative if x.group.endswith("_expert"))
    experts: dict[str, set[Format]] = defaultdict(set)
    for name in names:
        parent, dot, _ = name.rpartition(".")
        if dot and ".experts." in name:
            experts[parent].add(quant.format_of(name))
    frozen = {parent: frozenset(found) for parent, found in experts.items()}
    return Facts(config, text_shape(config), quant, formats, frozen, engine, tp)
