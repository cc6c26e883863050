"""Matching of tensor names against a family's table, and the choice of the family.

A big checkpoint has 118,000 names but only some 80 shapes of name: the numbers in a name are cut out, the
pattern that remains is classified once, and the numbers are put back. That keeps classification linear in the
names and independent of the number of rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import UnsupportedError
from .config import text_config
from .families import FAMILIES, GENERIC, Family
from .role import Role, TensorRole

_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,8})(?=\.)")  # 007 and numbers without end are no numbering
# Longest first: ``weight_scale_inv`` must not be read as ``inv`` below a module ``...weight_scale``.
_PARTS = (
    "weight_scale_inv", "weight_zero_point", "weight_packed", "weight_scale", "weight_shape", "weight_g_idx",
    "e_score_correction_bias", "input_scale", "inv_freq", "weight", "bias",
)  # fmt: skip
_EXPERT_PATTERN = re.compile(r"(?:^|\.)experts\.\d+\.([A-Za-z_]\w*)\.")
_FUSED_PATTERN = re.compile(
    r"(?:^|\.)experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3|w13)(?:[._]|$)"
)


@dataclass(frozen=True, slots=True)
class _Pattern:
    role: Role
    part: str
    projection: str | None
    layer_at: int | None  # which of the numbers in the name is the layer
    expert_at: int | None


@dataclass
class Classifier:
    """Names of one checkpoint read through one family's table.

    Attributes:
        family: the table.
        num_layers: ``num_hidden_layers``; layers from there on are multi-token-prediction layers. None: unknown,
            then no layer is taken for one.
        num_experts: routed experts per layer by config, None if the config does not say.
        text_config: the language model's part of config.json.
        warnings: what the user should know about the choice of the family.
    """

    family: Family
    num_layers: int | None
    num_experts: int | None
    text_config: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    _rules: list[tuple[Role, re.Pattern[str]]] = field(init=False, repr=False)
    _memo: dict[str, _Pattern] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        projections = "|".join(map(re.escape, self.family.projections))
        fill = {"{L}": r"(?P<layer>#)", "{E}": r"(?P<expert>#)", "{P}": rf"(?P<projection>{projections})"}
        self._rules = []
        for role, rule in self.family.rules:
            for key, value in fill.items():
                rule = rule.replace(key, value)
            self._rules.append((role, re.compile(rule)))

    def role_of(self, name: str) -> TensorRole:
        """The role of one tensor name; ``Role.OTHER`` when no rule matches."""
        numbers = _NUMBER.findall(name)
        key = _NUMBER.sub("#", name)
        pattern = self._memo.get(key)
        if pattern is None:
            pattern = self._memo[key] = self._classify(key)
        layer = int(numbers[pattern.layer_at]) if pattern.layer_at is not None else None
        expert = int(numbers[pattern.expert_at]) if pattern.expert_at is not None else None
        module = name[: -len(pattern.part) - 1] if pattern.part else name
        is_mtp = layer is not None and self.num_layers is not None and layer >= self.num_layers
        return TensorRole(pattern.role, module, pattern.part, layer, expert, pattern.projection, is_mtp)

    def _classify(self, key: str) -> _Pattern:
        part = next((p for p in _PARTS if key.endswith("." + p)), "")
        if not part and "." in key:
            part = key.rpartition(".")[2]
        module = key[: -len(part) - 1] if part else key
        offset = len(self.family.prefix) if module.startswith(self.family.prefix) else 0
        local = module[offset:]
        before = module[:offset].count("#")
        for role, rule in self._rules:
            if match := rule.fullmatch(local):
                groups = match.groupdict()
                last = local.rpartition(".")[2]
                spelling = groups.get("projection") or last
                return _Pattern(
                    role, part, self.family.projections.get(spelling, last if last != "#" else None),
                    self._ordinal(match, "layer", before), self._ordinal(match, "expert", before),
                )  # fmt: skip
        return _Pattern(Role.OTHER, part, None, None, None)

    @staticmethod
    def _ordinal(match: re.Match[str], group: str, before: int) -> int | None:
        if group not in match.re.groupindex or match.start(group) < 0:
            return None
        return before + match.string.count("#", 0, match.start(group))


def find_family(config: Mapping[str, Any], names: Iterable[str], *, override: str | None = None) -> Classifier:
    """Choose the family of a checkpoint and return the classifier for its names.

    Args:
        config: config.json ({} if there is none).
        names: all tensor names.
        override: the recipe's ``family``.

    Raises:
        UnsupportedError: there are no routed experts that any table recognises; the message says what was looked
            for and what the names look like.
    """
    names = list(names)
    by_name = {family.name: family for family in (*FAMILIES, GENERIC)}
    model_type = config.get("model_type")
    warnings: list[str] = []
    family = by_name.get(override) if override else None
    if override and family is None:
        raise UnsupportedError(f"unknown family {override!r}", accepted=", ".join(by_name))
    if family is None:
        family = next((f for f in FAMILIES if model_type in f.model_types), None)
    if family is not None:
        classifier = _classifier(family, config, warnings)
        if any(classifier.role_of(n).role is Role.ROUTED_EXPERT for n in names):
            return classifier
    return _generic(config, names, family, model_type)


def _generic(config: Mapping[str, Any], names: list[str], family: Family | None, model_type: object) -> Classifier:
    """Fall back to the usual words for a model type without a table, or whose names do not fit its table."""
    classifier = _classifier(GENERIC, config, [])
    if not any(classifier.role_of(n).role is Role.ROUTED_EXPERT for n in names):
        raise _no_experts(names, model_type)
    if family is None:
        said = f"model_type {model_type!r}" if model_type else "a config without model_type"
        why = f"{said} is not in the family table"
    else:
        why = f"tensor names do not follow the {family.name} table"
    warning = f"{why}; routed experts were recognised by the pattern experts.<n>.<projection>"
    return Classifier(
        classifier.family, classifier.num_layers, classifier.num_experts, classifier.text_config, (warning,)
    )


def _classifier(family: Family, config: Mapping[str, Any], warnings: list[str]) -> Classifier:
    text = text_config(config)
    layers = text.get("num_hidden_layers")
    experts = next((text[k] for k in family.expert_count_keys if isinstance(text.get(k), int)), None)
    return Classifier(family, layers if isinstance(layers, int) else None, experts, text, tuple(warnings))


def _no_experts(names: list[str], model_type: object) -> UnsupportedError:
    if fused := next((n for n in names if _FUSED_PATTERN.search(n)), None):
        return UnsupportedError(
            "routed experts are fused into one tensor per layer", where=fused,
            accepted="one tensor per expert and projection, as in model.layers.3.mlp.experts.0.up_proj.weight",
        )  # fmt: skip
    if odd := next((m for n in names if (m := _EXPERT_PATTERN.search(n))), None):
        return UnsupportedError(
            f"routed experts have the unknown projection {odd[1]!r}", where=odd.string,
            accepted=", ".join(GENERIC.projections),
        )  # fmt: skip
    shown = ", ".join(names[:3]) if names else "none"
    return UnsupportedError(
        f"no routed experts found (model_type {model_type!r}); looked for names like "
        f"experts.<n>.{{{','.join(GENERIC.projections)}}}.weight; the first tensors are {shown}",
        hint="quantkit converts Mixture-of-Experts checkpoints; for a dense model there is nothing to do",
    )
