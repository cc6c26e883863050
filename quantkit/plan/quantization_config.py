"""``quantization_config`` of the views, derived from how each module is stored there.

The decode view speaks compressed-tensors: one group per way of storing, targets that name exactly its modules,
and ``ignore`` with every two-dimensional weight that is left plain (engines refuse a linear that is in neither).
A derived prefill view speaks the publishers' ``fp8`` block convention.

Checked against: compressed-tensors 0.19 and transformers 5.17; docs/format.md section 3 states the layout.
Group A stands first because transformers takes the first group whose target mentions experts as the scheme of
all routed experts.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from ..checkpoint.tensor import Storage
from ..scheme import Fp8Block, Scheme
from .targets import Universe
from .views import Outcome

VERSION = "0.19.0"  # of compressed-tensors, whose layout this is
_IGNORE = "ignore"


def decode_config(
    config: Mapping[str, Any],
    outcomes: Mapping[str, Outcome],
    universe: Universe,
    scheme_of: Callable[[int], Scheme],
) -> dict[str, Any]:
    """config.json of the decode view.

    Args:
        config: the source's.
        outcomes: module -> how it is stored in the decode view.
        scheme_of: group size -> format of the quantized modules.
    """
    membership = _membership(config, outcomes, universe)
    members: dict[str, list[str]] = defaultdict(list)
    for module, group in membership.items():
        members[group].append(module)
    patterns = {group: universe.patterns(modules) for group, modules in members.items()}
    universe.check(patterns, membership)
    groups: dict[str, dict[str, Any]] = {}
    for key in sorted(k for k in members if k != _IGNORE):
        described = _describe(key, config, outcomes[members[key][0]], scheme_of)
        groups[f"group_{len(groups)}"] = {"targets": list(patterns[key]), **described}
    formats = {group["format"] for group in groups.values()}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "version": VERSION,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": groups,
        "ignore": list(patterns.get(_IGNORE, ())),
    }
    return _with_quantization(config, quantization)


def prefill_config(config: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """config.json of a derived prefill view."""
    plain = sorted(m for m, o in outcomes.items() if o.stored is Storage.PLAIN)
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(Fp8Block().block),
        "modules_to_not_convert": plain,
    }
    return _with_quantization(config, quantization)


def _membership(config: Mapping[str, Any], outcomes: Mapping[str, Outcome], universe: Universe) -> dict[str, str]:
    """Module -> key of its group. Keys sort in the order in which groups stand in the config."""
    groups, int4 = _source_groups(config), _int4_order(outcomes, universe)
    found: dict[str, str] = {}
    for module, outcome in outcomes.items():
        if outcome.stored is Storage.PLAIN:
            found[module] = _IGNORE
        elif outcome.stored is Storage.INT4_GROUP:
            found[module] = f"a-{int4[outcome.block[1]]}"
        elif outcome.stored is Storage.FP8_BLOCK:
            found[module] = f"b-{outcome.block[0]}x{outcome.block[1]}"
        else:
            found[module] = f"c-{_source_group(module, groups) or outcome.stored.value}"
    return found


def _int4_order(outcomes: Mapping[str, Outcome], universe: Universe) -> dict[int, int]:
    """Group size -> its rank: that of most routed experts first (see the module)."""
    routed: Counter[int] = Counter()
    for module, outcome in outcomes.items():
        if outcome.stored is Storage.INT4_GROUP:
            routed[outcome.block[1]] += universe.is_routed(module)
    return {size: rank for rank, size in enumerate(sorted(routed, key=lambda size: (-routed[size], size)))}


def _describe(
    key: str, config: Mapping[str, Any], outcome: Outcome, scheme_of: Callable[[int], Scheme]
) -> dict[str, Any]:
    if outcome.stored is Storage.INT4_GROUP:
        return _group("pack-quantized", scheme_of(outcome.block[1]).quantization_args(), None)
    if outcome.stored is Storage.FP8_BLOCK:
        block = Fp8Block(outcome.block)
        return _group("float-quantized", block.quantization_args(), {
            "num_bits": 8, "type": "float", "symmetric": True, "strategy": "group",
            "group_size": outcome.block[1], "dynamic": True,
        })  # fmt: skip
    published = _source_groups(config).get(key.removeprefix("c-"))
    if published is not None:
        args = copy.deepcopy(published["weights"])
        for name in ("scale_dtype", "zp_dtype"):  # older vLLM rejects these keys
            args.pop(name, None)
        return _group("float-quantized", args, copy.deepcopy(published.get("input_activations")))
    strategy = "channel" if outcome.stored is Storage.FP8_CHANNEL else "tensor"
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    return _group("float-quantized", weights, {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True,
    })  # fmt: skip


def _group(format: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    return {"format": format, "weights": weights, "input_activations": activations, "output_activations": None}


def _source_groups(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """FP8 groups of a compressed-tensors source by name."""
    from ..models.config import quantization_of

    groups = (quantization_of(config) or {}).get("config_groups")
    if not isinstance(groups, dict):
        return {}
    return {
        name: group
        for name, group in groups.items()
        if isinstance(group, dict) and isinstance(w := group.get("weights"), dict) and w.get("type") == "float"
    }


def _source_group(module: str, groups: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The source's group of a module: by its targets, a class name standing for every linear."""
    from .targets import matches

    for name, group in groups.items():
        stated = group.get("targets")
        targets = [t for t in stated if isinstance(t, str)] if isinstance(stated, list) else []
        if any(matches(t, module) for t in targets) or "Linear" in targets:
            return name
    return None


def _with_quantization(config: Mapping[str, Any], quantization: dict[str, Any]) -> dict[str, Any]:
    """The config with this quantization wherever the source states one, and at the top."""
    result = copy.deepcopy(dict(config))
    for place in (result, result.get("text_config")):
        if not isinstance(place, dict):
            continue
        place.pop("compression_config", None)
        if "quantization_config" in place or place is result:
            place["quantization_config"] = copy.deepcopy(quantization)
    return result
