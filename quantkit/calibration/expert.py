"""One routed expert: its weights streamed in, run over its tokens, and calibrated by them.

gate and up see the same tokens and share one Hessian and one factorisation. down's Hessian is taken behind the
gate and up that were just quantized, because that is what it will see. A token counts the square of its routing
weight, since the expert's output is multiplied by it.

**Folds.** Methods with AWQ move a scale from up to down first (``awq.py``). It is chosen by the inputs of down
behind the original gate and up: what the quantized ones add to them is little beside the differences between the
columns, and gate and up can still be quantized together. up's rows are divided, so that its inputs and its Hessian
stay as they are; down's Hessian is taken anew, behind what was folded.

**Starved experts.** An expert with fewer than ``min_tokens`` tokens has its Hessians shrunk towards the layer's
average input (``Hessian.shrunk``): ``AVERAGE_TOKENS`` tokens spread evenly over all samples, each counting the
layer's mean squared routing weight; for down the same tokens sent through this expert's gate and up. The facts of
every weight say how many tokens it had and whether it was shrunk. The default of 512: share of rtn's KL on
tiny-glm with 128 tokens per expert, on tiny-qwen3 with 128 and with 512 (48 blocks, standard error about 0.03)::

    min_tokens   128   0.69   0.54   0.44
                 512   0.67   0.50   0.43
                1024          0.52   0.41

**All tokens** (``route_all``). Hessians from all tokens of the layer, each counting 1, as llm-compressor's
``moe_calibrate_all_experts`` does it; outputs, and thereby what the next layer sees, go by the routing as ever. No
expert is starved then, so ``min_tokens`` has no effect; the facts count all tokens, and those routed to it.
The products of the Hessians cost as many times more as there are experts for each one that a token is routed to.

What each choice gave, mean KL divergence of tiny-glm to its FP8 weights, groups of 32, converted with the default
calibration set (128 x 256 tokens), as a share of rtn's; differences are paired by block, with standard errors:

==============================  ======  =====  ==================
choice                          blocks  share  difference to gptq
==============================  ======  =====  ==================
**gptq**                           100  0.494
down_inputs: original              100  0.500  +0.005 +- 0.016
route_all                          100  0.581  +0.087 +- 0.021
**gptq**                           200  0.498
awq                                200  0.752  +0.254 +- 0.015
gptq+awq                           200  0.475  -0.024 +- 0.012
==============================  ======  =====  ==================

So all tokens are worse than an expert's own where these are enough, which inputs down learns from is undecided,
and the fold adds a little to gptq, two standard errors here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quantkit.recipe.sections import FOLDING_METHODS
from quantkit.recipe.treatment import Treatment

from .awq import fold_expert, round_by_importance
from .experts import Inputs, Routed
from .gptq import Calibrated, GptqSettings, gptq
from .hessian import Hessian
from .retry import Over, retried

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Weights = Mapping[str, NDArray[np.float32]]

GATE, UP, DOWN = "gate", "up", "down"
AVERAGE_TOKENS = 512
MIN_TOKENS = 512
_QUANTIZERS = {"gptq": gptq, "awq": round_by_importance, "gptq+awq": gptq}
Gating = Callable[["Tensor"], "Tensor"]  # [n, 2 M], gate beside up -> [n, M], the model's own


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """How an expert is calibrated.

    Attributes:
        gptq: of each weight, but for its group size, which is the weight's own.
        min_tokens: an expert with fewer is starved.
        propagate: ``quantized`` (the next layer sees what this one will compute) or ``original``.
        route_all: learn from all tokens of the layer, each counting 1; then no expert is starved.
        down_inputs: down learns behind the ``quantized`` gate and up, or the ``original`` ones.
    """

    gptq: GptqSettings = field(default_factory=GptqSettings)
    min_tokens: int = MIN_TOKENS
    propagate: str = "quantized"
    route_all: bool = False
    down_inputs: str = "quantized"

    def is_starved(self, tokens: int) -> bool:
        """Whether an expert with so many tokens borrows from the average of the layer."""
        return not self.route_all and tokens < self.min_tokens


class Expert:
    """The function of one expert, from its three weights.

    Args:
        weights: float32 by projection, gate and up ``[M, H]``, down ``[H, M]``.
        gating: the model's own function of gate and up.
        device: where it computes.
    """

    def __init__(self, weights: Weights, gating: Gating, device: str = "cpu") -> None:
        import torch

        self._gating = gating
        gate, up, self._down = (torch.from_numpy(weights[p]).to(device) for p in (GATE, UP, DOWN))
        self._entry = gate, up

    def inner(self, states: Tensor) -> Tensor:
        """Inputs of down ``[n, M]``."""
        import torch

        gate, up = (states @ weight.T for weight in self._entry)
        return self._gating(torch.cat([gate, up], -1))

    def __call__(self, states: Tensor) -> Tensor:
        """``[n, H]`` -> ``[n, H]``."""
        return self.inner(states) @ self._down.T


def calibrate_expert(
    weights: Weights, chosen: Mapping[str, Treatment], routed: Routed, inputs: Inputs, gating: Gating, where: str,
    settings: ExpertSettings, over: Over | None = None, rounded: Weights | None = None,
) -> tuple[dict[str, Calibrated], Tensor]:  # fmt: skip
    """Quantize the ``chosen`` projections of an expert by its tokens.

    Args:
        weights: float32 by projection.
        chosen: how each of them is quantized; gate and up share their Hessian in any case.
        routed: its tokens.
        inputs: all tokens of the layer, for the average.
        where: name of the expert, for errors.
        over: how far a result is over its limit; then it is tried again (``retry.py``).
        rounded: what projections that are not chosen are in the quantized model, where that is not ``weights``.

    Returns:
        Results by projection, and the weighted outputs ``[n, H]`` that go on.

    Raises:
        SourceError: an activation that is not finite, a Hessian that stays singular; ``where`` and the projection
            are named.
    """
    tokens = len(routed.tokens)
    average = _average(inputs) if settings.is_starved(tokens) else None
    learned = inputs.all() if settings.route_all else routed
    entry = [p for p in (GATE, UP) if p in chosen]
    found: dict[str, Calibrated] = {}
    original = weights
    sent: dict[str, Any] = {"routed": tokens} if settings.route_all else {}

    def hessian_of(projections: list[str], seen: Callable[[Tensor], Tensor]) -> Hessian:
        at = f"{where}.{'/'.join(projections)}"
        return _hessian(original[projections[0]].shape[1], at, seen, learned, average, settings)

    moved: dict[str, dict[str, Any]] = {}
    if DOWN in chosen and chosen[DOWN].method in FOLDING_METHODS:  # and up's is the same
        own = replace(settings.gptq, group_size=chosen[DOWN].group_size)
        seen = Expert(weights, gating, inputs.device).inner
        fold = fold_expert(weights[UP], weights[DOWN], hessian_of([DOWN], seen), own)
        weights = {**weights, UP: fold.up, DOWN: fold.down}
        moved[UP] = moved[DOWN] = {"fold_scale": fold.scale, "fold_alpha": fold.alpha}
    replaced = {**weights, **(rounded or {})}

    def quantize(projections: list[str], seen: Callable[[Tensor], Tensor]) -> None:
        hessian = hessian_of(projections, seen)
        for way in dict.fromkeys(chosen[p] for p in projections):
            own = replace(settings.gptq, group_size=way.group_size)
            alike = [p for p in projections if chosen[p] == way]
            results = _QUANTIZERS[way.method]([weights[p] for p in alike], hessian, own)
            for projection, result in zip(alike, results, strict=True):
                if over is not None:
                    result = retried(result, weights[projection], hessian, own, partial(over, projection))
                found[projection] = replace(result, **sent, **moved.get(projection, {}))
                replaced[projection] = _back(result, hessian.columns)

    if entry:
        quantize(entry, lambda states: states)
    if DOWN in chosen:
        before = replaced if settings.down_inputs == "quantized" else weights
        quantize([DOWN], Expert(before, gating, inputs.device).inner)
    goes_on = replaced if settings.propagate == "quantized" else original
    return found, routed.outputs(Expert(goes_on, gating, inputs.device))


def facts(result: Calibrated, settings: ExpertSettings) -> dict[str, Any]:
    """What the artifact records of a calibrated weight; figures are rounded by whoever writes them.

    ``tokens`` that it learned from, ``shrunk`` if these were too few, ``routed_tokens`` only where it learned from
    all: what the router sent; ``form`` of the Hessian, ``percdamp`` used
    and the ``attempts`` it took, rows that took a floor's codes, and ``error_to_rtn``, squared error of the output
    over the tokens relative to rounding to nearest (None when that has none), ``weight_error_to_rtn``, that of the
    weight whatever the tokens; of folded weights ``fold_alpha``, and ``retry`` only where one was taken.
    """
    rtn, plain = (errors.get("rtn", 0.0) for errors in (result.floor_errors, result.floor_weight_errors))
    error = float(result.weight.error.sum(axis=1, dtype="float64").sum())
    return {
        "tokens": result.tokens, "shrunk": settings.is_starved(result.tokens),
        **({} if result.routed is None else {"routed_tokens": result.routed}), "form": result.form,
        "percdamp": result.percdamp, "attempts": result.attempts, "rows_from_floor": result.rows_from_floor,
        "error_to_rtn": result.hessian_error / rtn if rtn > 0 else None,
        **({} if result.retry is None else {"retry": result.retry}),
        "weight_error_to_rtn": error / plain if plain > 0 else None,
        **({} if result.fold_alpha is None else {"fold_alpha": result.fold_alpha}),
    }  # fmt: skip


def _average(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Tokens spread evenly over the layer's, and what each counts, on the device."""
    import torch

    total = inputs.states.shape[0]
    count = min(AVERAGE_TOKENS, total)
    rows = torch.arange(count, device="cpu") * total // count
    states, weight = inputs.states[rows].to(inputs.device), inputs.weight[rows].to(inputs.device)
    return states, weight.square().mean().expand(count)


def _hessian(
    columns: int, where: str, seen: Callable[[Tensor], Tensor], learned: Routed,
    average: tuple[Tensor, Tensor] | None, settings: ExpertSettings,
) -> Hessian:  # fmt: skip
    hessian = Hessian(columns, where=where, device=learned.device)
    for states, weight in learned.chunks():
        hessian.add(seen(states), weight.square())
    if average is None:
        return hessian
    others = Hessian(columns, where=f"{where} (average of the layer)", device=learned.device)
    others.add(seen(average[0]), average[1])
    return hessian.shrunk(others, settings.min_tokens)


def _back(result: Calibrated, columns: int) -> NDArray[np.float32]:
    import quantkit_kernels as kernels

    return kernels.int4_to_float32(result.weight.packed, result.weight.scale, columns)
