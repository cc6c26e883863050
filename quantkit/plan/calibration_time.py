"""Core-seconds that a calibrated method takes, from the shapes of a plan and measured rates of this machine.

    core seconds = floating-point operations / rate of matrix products + elements / rate of the kernels

Operations: all tokens through every layer up to the last calibrated one (its attention twice, before and after the
experts), experts with the tokens that reach them were the router even, and GPTQ's Hessian, factor and sweep
(``quantkit.calibration.factor`` has the formulas). Elements: the calibrated weights, which are searched for
scales, compared and copied, and the scores of attention; each as so many times the scale search of ``mse``, whose
rate is measured.

Both multiples were fitted on one machine (AVX-512, torch 2.13) to experts of six shapes between 256 x 128 and
7168 x 2048, and to tiny-glm as a whole; the formula was within 25 % of all but the smallest (half).
Left out: GPUs, what starved experts add, and AWQ's searches.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ..models.config import text_shape
from ..models.role import Role
from ..recipe.sections import CALIBRATED_METHODS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..checkpoint import Checkpoint
    from ..checkpoint.tensor import StoredWeight
    from ..models.config import TextShape
    from ..recipe.sections import CalibrationSection
    from .plan import Plan
    from .probe import Rates

START_SECONDS = 3.0  # importing torch and transformers, tokenising
SEARCHES_PER_WEIGHT = 9
SEARCHES_PER_SCORE = 3
_LOW_RANK_RATIO = 4  # of quantkit.calibration.hessian, which plan does not import


def calibration_seconds(plan: Plan, checkpoint: Checkpoint, rates: Rates, workers: int) -> float | None:
    """Seconds that calibration adds on ``workers`` cores; None where the rate or a number of the model is unknown,
    and for another engine.

    Raises:
        SourceError: the config lacks a number that every model has.
    """
    section = plan.recipe.calibration
    if section is None or rates.matmul_flops_per_s is None or plan.recipe.engine != "quantkit":
        return None
    shape = text_shape(checkpoint.config)
    jobs = (job for job in plan.jobs("decode") if job.method in CALIBRATED_METHODS)
    weights = {weight.weight.name: weight for weight in checkpoint.weights().values()}
    calibrated = {job.sources[0]: weights[job.sources[0]] for job in jobs}
    last = max((plan.fates[name].layer or 0 for name in calibrated), default=-1)
    flops = _gptq_flops(plan, calibrated, section, shape)
    flops += _forward_flops(plan, weights, last, section, shape)
    elements = sum(w.shape[0] * w.shape[1] for w in calibrated.values())
    scores = 2 * section.samples * section.length**2 * shape.heads * (last + 1)
    searches = SEARCHES_PER_WEIGHT * elements + SEARCHES_PER_SCORE * scores
    cpu = flops / rates.matmul_flops_per_s + searches / rates.weights_per_s
    return START_SECONDS + cpu / workers


def tokens_seen(role: Role, section: CalibrationSection, shape: TextShape) -> float:
    """Tokens that reach a linear of this role."""
    tokens = section.samples * section.length
    if role is not Role.ROUTED_EXPERT or section.route_all or not shape.experts:
        return tokens
    return tokens * shape.top_k / shape.experts


def gptq_flops(outputs: int, columns: int, tokens: float) -> float:
    """Hessian, factor and sweep for ``[outputs, columns]`` that shares its inputs."""
    if tokens <= columns / _LOW_RANK_RATIO:
        return 4 * tokens**2 * columns + 4 * outputs * tokens * columns
    return 2 * tokens * columns**2 + columns**3 / 3 + outputs * columns**2


def _gptq_flops(
    plan: Plan, calibrated: Mapping[str, StoredWeight], section: CalibrationSection, shape: TextShape
) -> float:
    """Of all weights; those beside each other with as many columns (gate and up) share their inputs."""
    outputs: dict[tuple[str, int, Role], int] = defaultdict(int)
    for name, weight in calibrated.items():
        outputs[weight.module.rpartition(".")[0], weight.shape[1], plan.fates[name].role] += weight.shape[0]
    return sum(
        gptq_flops(rows, columns, tokens_seen(role, section, shape))
        for (_, columns, role), rows in outputs.items()
    )


def _forward_flops(
    plan: Plan, weights: Mapping[str, StoredWeight], last: int, section: CalibrationSection, shape: TextShape
) -> float:
    """Twice the weights for each token; twice over, before and after the experts or original and quantized."""
    total = 0.0
    for name, weight in weights.items():
        fate = plan.fates[name]
        if fate.layer is not None and fate.layer <= last and fate.role is not Role.MTP:
            total += 4 * weight.shape[0] * weight.shape[1] * tokens_seen(fate.role, section, shape)
    return total
