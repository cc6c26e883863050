"""AWQ (Lin et al. 2023) inside one expert: scales move from up's output to down's input; the pair stays exact.

An expert computes down(act(gate x) * (up x)), which is linear in up. Dividing row j of up by s_j and multiplying
column j of down by it changes nothing but rounding, and nothing outside the expert: norms, router, shared experts
and the FP8 view keep their bytes. AWQ makes the columns of down larger that see large inputs, so that they lose
less to the group's step; up loses nothing, since its groups lie within a row and their steps scale with it.

The search is the paper's: s = a^alpha / sqrt(max * min), where a_j is the root mean square of down's input j (the
paper takes the mean of absolute values; the Hessian's diagonal holds the squares), alpha from 0 (no fold) to 1 in
20 steps. The loss is the paper's too, squared error of down's output over the calibration tokens, e H e^T, on a
fixed sample of output rows. Clipping is the search for the scales by importance (``mse`` grid, factors down to
0.7) with the diagonal of H, for each fold tried and for the final rounding.

Left out: folding into the norm before gate and up. It changes the norm for every consumer, which an artifact whose
prefill view is the publisher's cannot follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.errors import UsageError

from .gptq import Calibrated, GptqSettings, check_weights, finish, hessian_norms
from .hessian import Hessian

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quantkit_kernels import Int4Weight

NUM_STEPS = 20  # alpha = 0, 1/20 ... 1
SAMPLE_ROWS = 256  # rows of down on which alpha is chosen
_SMALLEST = 1e-4  # of the largest input scale: columns that see nothing must not make the others huge


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """Weights of an expert after the fold, to be quantized as they are.

    Attributes:
        up: float32 ``[M, I]``, rows divided by ``scale``.
        down: float32 ``[O, M]``, columns multiplied by ``scale``.
        scale: float32 ``[M]``.
        alpha: chosen exponent; 0 means that the fold is the identity.
        error: e H e^T on the sampled rows with this fold.
        plain_error: the same without a fold.
    """

    up: NDArray[np.float32]
    down: NDArray[np.float32]
    scale: NDArray[np.float32]
    alpha: float
    error: float
    plain_error: float


def fold_expert(
    up: NDArray[np.float32], down: NDArray[np.float32], down_inputs: Hessian, settings: GptqSettings | None = None
) -> Fold:
    """Choose and apply the scale between up and down.

    Args:
        up: float32 ``[M, I]``.
        down: float32 ``[O, M]``.
        down_inputs: Hessian of down's inputs, act(gate x) * (up x), before the fold.
        settings: group size and device.

    Raises:
        UsageError: shapes that don't belong together.
    """
    import numpy as np

    settings = settings or GptqSettings()
    check_weights([down], down_inputs)
    if up.ndim != 2 or up.shape[0] != down.shape[1]:
        raise UsageError(
            f"up of shape {list(up.shape)} before down of shape {list(down.shape)}",
            where=down_inputs.where,
            accepted=f"up with {down.shape[1]} rows",
        )
    energy = down_inputs.diagonal().cpu().numpy().astype(np.float64)
    rows = np.arange(min(SAMPLE_ROWS, down.shape[0])) * down.shape[0] // min(SAMPLE_ROWS, down.shape[0])
    sample = np.ascontiguousarray(down[rows])
    best_error, best_alpha, best_scale = np.inf, 0.0, np.ones(down.shape[1], np.float32)
    plain_error = 0.0
    for step in range(NUM_STEPS + 1 if energy.any() else 1):
        scale = _scale(energy, step / NUM_STEPS)
        error = _error(sample, scale, down_inputs, settings)
        plain_error = error if step == 0 else plain_error
        if error < best_error:
            best_error, best_alpha, best_scale = error, step / NUM_STEPS, scale
    return Fold(
        up=up / best_scale[:, None],
        down=down * best_scale,
        scale=best_scale,
        alpha=best_alpha,
        error=float(best_error),
        plain_error=float(plain_error),
    )


def round_by_importance(
    weights: Sequence[NDArray[np.float32]], hessian: Hessian, settings: GptqSettings | None = None
) -> list[Calibrated]:
    """Quantize weights by rounding, with scales and clips searched by the diagonal of the Hessian.

    Args:
        weights: float32 ``[O, I]`` each, with the same inputs.
        hessian: of these inputs; behind a fold those of the folded weights (``Hessian.scaled``).
        settings: default GptqSettings(); floors apply as in ``gptq``.

    Raises:
        UsageError, ValueError, NonFiniteError: as ``gptq``.
    """
    import numpy as np

    settings = settings or GptqSettings()
    check_weights(weights, hessian)
    weight = np.concatenate(weights) if len(weights) > 1 else np.ascontiguousarray(weights[0])
    found = _rounded(weight, hessian.diagonal().cpu().numpy(), settings.group_size)
    norms = hessian_norms(weight, found, hessian, settings.device)
    return finish(weights, weight, found, norms, hessian, settings, None)


def _scale(energy: NDArray[np.float64], alpha: float) -> NDArray[np.float32]:
    import numpy as np

    size = np.sqrt(energy)
    size = np.maximum(size, size.max() * _SMALLEST) if energy.any() else np.ones_like(size)
    powers = size**alpha
    scale: NDArray[np.float32] = (powers / np.sqrt(powers.max() * powers.min())).astype(np.float32)
    return scale


def _rounded(weight: NDArray[np.float32], energy: NDArray[np.float32], group_size: int) -> Int4Weight:
    """Rounded with the scale search by ``energy``; columns without energy count a little, or anything would do."""
    import numpy as np

    import quantkit_kernels as kernels

    floor = max(float(energy.mean()) * 0.01, float(np.finfo(np.float32).tiny))
    return kernels.float_to_int4(weight, group_size, "mse", importance=energy + np.float32(floor))


def _error(
    down: NDArray[np.float32], scale: NDArray[np.float32], inputs: Hessian, settings: GptqSettings
) -> float:
    """e H e^T of these rows of down when they are rounded behind the fold."""
    import torch

    folded = inputs.scaled(1 / torch.from_numpy(scale))
    weight = down * scale
    found = _rounded(weight, folded.diagonal().cpu().numpy(), settings.group_size)
    return float(hessian_norms(weight, found, folded, settings.device).sum())
