"""Which format a ``quantization_config`` gives to a module, read as the engines read it.

Two dialects matter: ``fp8`` (DeepSeek's block FP8 with ``modules_to_not_convert``) and ``compressed-tensors``
(groups with targets, an ignore list; ``re:`` marks a pattern, anything else is a module name or the class
``Linear``). Ignored modules are plain; otherwise the first group with a matching target decides. Only what the
engine rules ask for is kept. Source: compressed-tensors 0.19 ``utils/match.py``; transformers 5.17
``quantizers/quantizer_finegrained_fp8.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import SourceError


@dataclass(frozen=True, slots=True)
class Format:
    """How one module is stored.

    Attributes:
        kind: ``plain``, ``int4``, ``fp8-block``, ``fp8-channel`` or ``other``.
        group_size: columns per scale for int4; -1 is one scale per row.
        block: rows and columns per scale for fp8-block.
        detail: what an ``other`` format calls itself.
    """

    kind: str
    group_size: int = 0
    symmetric: bool = True
    actorder: str | None = None
    block: tuple[int, int] = (0, 0)
    detail: str = ""

    def __str__(self) -> str:
        if self.kind == "int4":
            return f"INT4 group {self.group_size}"
        if self.kind == "fp8-block":
            return f"FP8 block {self.block[0]}x{self.block[1]}"
        return {"plain": "unquantized", "fp8-channel": "FP8 per channel"}.get(self.kind, self.detail)


PLAIN = Format("plain")


class _Matcher:
    """Entries of an ignore or target list; GLM-5.2 lists 541 names, so names are looked up and not walked."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._names = frozenset(e for e in entries if not e.startswith("re:"))
        self._patterns = tuple(re.compile(e[3:]) for e in entries if e.startswith("re:"))

    def matches(self, module: str) -> bool:
        """By ``Linear``, pattern, whole name, a parent's name, or the last components (MiniMax: ``gate``)."""
        if "Linear" in self._names or any(p.match(module) for p in self._patterns):
            return True
        if not self._names:
            return False
        cuts = [i for i, letter in enumerate(module) if letter == "."]
        return (
            module in self._names
            or any(module[:i] in self._names for i in cuts)
            or any(module[i + 1 :] in self._names for i in cuts)
        )


@dataclass(frozen=True)
class QuantizationMap:
    """Module name -> format.

    Attributes:
        method: ``quant_method``, empty when the model is not quantized.
        groups: targets and format, in order; first match wins.
        ignore: names and ``re:`` patterns that stay plain.
    """

    method: str
    groups: tuple[tuple[tuple[str, ...], Format], ...] = ()
    ignore: tuple[str, ...] = ()
    _ignored: _Matcher = field(init=False, repr=False, compare=False)
    _targets: tuple[tuple[_Matcher, Format], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ignored", _Matcher(self.ignore))
        object.__setattr__(self, "_targets", tuple((_Matcher(targets), stored) for targets, stored in self.groups))

    def format_of(self, module: str) -> Format:
        """The format of a linear module, by its name without ``.weight``."""
        if self._ignored.matches(module):
            return PLAIN
        return next((stored for targets, stored in self._targets if targets.matches(module)), PLAIN)

    @property
    def is_mixed(self) -> bool:
        """Whether two groups store different formats."""
        return len({stored for _, stored in self.groups}) > 1

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(target for targets, _ in self.groups for target in targets)


def read_quantization(quantization: Mapping[str, Any] | None) -> QuantizationMap:
    """Read a ``quantization_config`` (None: unquantized); unknown methods become one ``other`` group."""
    if not quantization:
        return QuantizationMap("")
    method = str(quantization.get("quant_method", ""))
    if method == "fp8":
        block = quantization.get("weight_block_size")
        stored = Format("fp8-block", block=_pair(block)) if block else Format("other", detail="FP8 per tensor")
        skip = _names(quantization, "modules_to_not_convert")
        # lm_head is never converted by the engines, listed or not.
        return QuantizationMap(method, ((("Linear",), stored),), ("lm_head", *skip))
    if method == "compressed-tensors":
        groups = [
            _mapping(g, "config_groups") for g in _mapping(quantization, "config_groups", inside=True).values()
        ]
        return QuantizationMap(
            method,
            tuple((_names(group, "targets"), _format(group)) for group in groups),
            _names(quantization, "ignore"),
        )
    return QuantizationMap(method, ((("Linear",), Format("other", detail=method or "unknown")),))


def _format(group: Mapping[str, Any]) -> Format:
    weights = _mapping(group, "weights", inside=True)
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    symmetric = weights.get("symmetric", True) is True
    if (bits, kind) == (4, "int") and strategy in ("group", "channel"):
        size = _whole(weights.get("group_size") or -1, "group_size") if strategy == "group" else -1
        return Format("int4", group_size=size, symmetric=symmetric, actorder=_word(weights.get("actorder")))
    if (bits, kind, strategy) == (8, "float", "block"):
        return Format("fp8-block", symmetric=symmetric, block=_pair(weights.get("block_structure")))
    if (bits, kind, strategy) == (8, "float", "channel"):
        return Format("fp8-channel", symmetric=symmetric)
    return Format("other", detail=f"{bits}-bit {kind} per {strategy}")


def _mapping(value: object, key: str, *, inside: bool = False) -> Mapping[str, Any]:
    """``value``, or with ``inside`` what it holds under ``key`` ({} when nothing), as a mapping."""
    found = (value.get(key) or {}) if inside and isinstance(value, Mapping) else value
    if not isinstance(found, Mapping):
        raise _wrong(key, found, "an object")
    return found


def _names(place: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of module names and ``re:`` patterns; every pattern compiles."""
    found = place.get(key) or ()
    if not isinstance(found, (list, tuple)) or not all(isinstance(entry, str) for entry in found):
        raise _wrong(key, found, "a list of names")
    for entry in found:
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            raise _wrong(key, entry, f"a regular expression ({error})") from None
    return tuple(found)


def _word(value: object) -> str | None:
    return None if value is None else str(value)


def _whole(value: object, key: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _wrong(key, value, "a whole number")


def _wrong(key: str, value: object, accepted: str) -> SourceError:
    seen = repr(value)
    return SourceError(
        f"quantization_config: {key} is {seen if len(seen) < 80 else seen[:77] + '...'}", where="config.json",
        accepted=accepted, hint="Restore the publisher's config.json.",
    )  # fmt: skip


def _pair(value: object) -> tuple[int, int]:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        return _whole(value[0], "the block size"), _whole(value[1], "the block size")
    return 128, 128
