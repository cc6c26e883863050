"""Which modules become INT4: the recipe's wishes, held against what must never be quantized.

Why the forbidden set is code and not a recipe's default: a router, an indexer or ``kv_b_proj`` in INT4 loads and
answers, only worse, and public tools have shipped all three by a pattern that was a little too wide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..checkpoint.tensor import StoredWeight, TensorInfo
from ..errors import RecipeError
from ..models.role import Role, TensorRole
from ..recipe.sections import CALIBRATED_METHODS, DecodeSection

_BY_LINEARS: Mapping[str, frozenset[Role]] = {
    "routed": frozenset({Role.ROUTED_EXPERT}),
    "all-mlp": frozenset({Role.ROUTED_EXPERT, Role.SHARED_EXPERT, Role.DENSE_MLP}),
    "all": frozenset({Role.ROUTED_EXPERT, Role.SHARED_EXPERT, Role.DENSE_MLP, Role.ATTENTION}),
}
_FORBIDDEN: Mapping[Role, str] = {
    Role.ROUTER: "a router",
    Role.NORM: "a norm",
    Role.EMBEDDING: "an embedding",
    Role.LM_HEAD: "the output head",
    Role.INDEXER: "part of the sparse-attention indexer",
    Role.MTP: "part of the multi-token-prediction head",
    Role.VISION: "part of the vision model",
}


@dataclass(frozen=True)
class Modules:
    """The modules of a checkpoint with their roles.

    ``weights`` and ``roles`` have the same keys; ``others`` are tensors outside of any two-dimensional weight.
    """

    weights: Mapping[str, StoredWeight]
    roles: Mapping[str, TensorRole]
    others: Mapping[str, tuple[TensorInfo, TensorRole]]

    def all_roles(self) -> Iterator[TensorRole]:
        """The role of every module and of every tensor outside of one."""
        yield from self.roles.values()
        for _, role in self.others.values():
            yield role


def forbidden_because(role: TensorRole) -> str | None:
    """Why a module can't be quantized, in words that follow "is", or None if it can."""
    if role.role in _FORBIDDEN:
        return _FORBIDDEN[role.role]
    if role.projection == "kv_b_proj":
        return "kv_b_proj, which attention absorbs into its latent space"
    return None


def select(modules: Modules, decode: DecodeSection) -> frozenset[str]:
    """Names of the modules to quantize.

    Raises:
        RecipeError: a pattern catches something that is never quantized, or nothing; a layer does not exist or has
            nothing to quantize; nothing is left to quantize.
    """
    wanted = _by_role(modules, decode) | _by_pattern(modules, decode.quantize)
    kept: set[str] = set()
    for pattern in decode.keep:
        hits = {m for m in modules.weights if re.search(pattern, m)}
        if not hits:
            raise RecipeError(f"the pattern {pattern!r} matches no module", where="decode.keep")
        kept |= hits
    chosen = frozenset(wanted - kept)
    if not chosen:
        raise RecipeError(
            "nothing is left to quantize", where="decode",
            hint="Check decode.layers, decode.keep and decode.linears.",
        )  # fmt: skip
    return chosen


def _by_role(modules: Modules, decode: DecodeSection) -> set[str]:
    roles = _BY_LINEARS[decode.linears]
    candidates = {m: r for m, r in modules.roles.items() if r.role in roles and forbidden_because(r) is None}
    main = {m: r for m, r in candidates.items() if decode.mtp == "quantize" or not r.is_mtp}
    if decode.layers is None:
        return set(main)
    _check_layers(decode, {r.layer for r in candidates.values()}, {r.layer for r in main.values()})
    layers = frozenset(decode.layers)
    return {m for m, r in main.items() if r.layer in layers}


def _check_layers(decode: DecodeSection, all_layers: set[int | None], main_layers: set[int | None]) -> None:
    layers = decode.layers or ()
    if mtp := [n for n in layers if n in all_layers and n not in main_layers]:
        raise RecipeError(
            f"layer {mtp[0]} is a multi-token-prediction layer, which decode.mtp keeps", where="decode.layers",
            hint="Set decode.mtp: quantize, or leave the layer out.",
        )  # fmt: skip
    if missing := [n for n in layers if n not in all_layers]:
        raise RecipeError(
            f"no module to quantize in layer {', '.join(map(str, missing))}", where="decode.layers",
            accepted=f"layers {ranges(n for n in main_layers if n is not None)} with linears: {decode.linears}",
        )  # fmt: skip


def _by_pattern(modules: Modules, patterns: Iterable[str]) -> set[str]:
    chosen: set[str] = set()
    for pattern in patterns:
        compiled = re.compile(pattern)
        hits = {m for m, w in modules.weights.items() if compiled.search(m) or compiled.search(w.weight.name)}
        for module in sorted(hits):
            if why := forbidden_because(modules.roles[module]):
                raise _forbidden(pattern, modules.weights[module].weight.name, why)
        for name, (_, role) in modules.others.items():
            if compiled.search(name) and role.module not in hits:
                why = forbidden_because(role)
                raise _forbidden(pattern, name, why or "not a two-dimensional weight")
        if not hits:
            raise RecipeError(f"the pattern {pattern!r} matches no module", where="decode.quantize")
        chosen |= hits
    return chosen


def _forbidden(pattern: str, tensor: str, why: str) -> RecipeError:
    return RecipeError(
        f"the pattern {pattern!r} catches {tensor!r}, which is {why} and is never quantized",
        where="decode.quantize",
        hint="Narrow the pattern; there is no option to force it.",
    )  # fmt: skip


def ranges(numbers: Iterable[int]) -> str:
    """``3-77, 80`` for people."""
    spans: list[list[int]] = []
    for n in sorted(set(numbers)):
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def check_calibrated(modules: Modules, chosen: frozenset[str], method: str, where: str = "decode.method") -> None:
    """Calibration gives weights of layers; nothing falls back silently.

    Raises:
        RecipeError: another module is to be quantized by a calibrated method.
    """
    for module in sorted(chosen) if method in CALIBRATED_METHODS else ():
        role = modules.roles[module]
        if role.layer is None:
            raise RecipeError(
                f"method {method} does not quantize modules outside of the decoder layers: {module}", where=where,
                accepted="modules of decoder layers and multi-token-prediction layers",
                hint="Choose fewer modules, or the method mse.",
            )  # fmt: skip
