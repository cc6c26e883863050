"""GPTQ for symmetric INT4 groups: weights and a Hessian in, the artifact's INT4 out (Frantar et al. 2022).

What is minimised, for each output row apart, is the Hessian norm e H e^T of the error e: the squared error of the
linear's output over the calibration tokens. Steps:

1. Scales, one per group of columns in natural order, found before the sweep: the grid of ``mse`` with each squared
   error counting the damped diagonal of H. They stay as they are (static groups), so that columns may be quantized
   in any order and the artifact is in natural order (``actorder: null`` on disk).
2. The factor of H (``factor.py``), once for all weights that share their inputs.
3. The sweep (``compensate.py``), columns of high energy first.
4. Floor: a row for which plain ``rtn`` has the smaller Hessian norm takes its codes, so the result is never worse,
   row by row. The sweep is greedy; without this nothing guarantees it. (With ``mse`` as a second floor, 15 of the
   40,960 rows of tiny-glm's experts took one of the two, for a sixth of the time; it is an option.)

Layout, scale rule and rounding are those of quantkit_kernels: the scales are candidates of its grid in bf16, the
codes are clamp(rne(u / float32(scale)), -8, 7), and ``error`` and ``energy`` are summed in its order.

What each choice gave, mean KL divergence of tiny-glm to its FP8 weights as a share of rtn's (bench/bench_gptq.py:
128 x 256 calibration tokens, layer after layer behind quantized ones). Compare within a column: the first is on
200 blocks of held-out text, the others on 100. Standard errors of single shares are about 0.03, not paired.

=====================================================  =====  =====  =====
choice                                                 g32    g32    g128
=====================================================  =====  =====  =====
mse                                                    0.833  0.777  0.838
awq (fold, scales by the diagonal, rounding)                  0.693
natural order of columns                               0.551
**activation order, static scales by the diagonal**    0.530  0.522  0.494
the same, tokens counting squared routing weights      0.526
the same behind the AWQ fold (gptq+awq)                       0.469
=====================================================  =====  =====  =====

Activation order is therefore the default; the routing weights are the caller's choice (``counts`` of
``Hessian.add``), within the error of these figures. Not measured: other dampening than 0.01, scales searched again
when their group is reached (not possible in activation order with static groups).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quantkit.errors import UsageError

from .compensate import compensate
from .factor import Factor, factorise
from .hessian import Hessian

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quantkit_kernels import Int4Weight


@dataclass(frozen=True, slots=True)
class GptqSettings:
    """Knobs of GPTQ.

    Attributes:
        group_size: 32, 64 or 128.
        percdamp: least dampening as a share of the mean diagonal of the Hessian (``factor.py`` says when more).
        max_percdamp: the largest share; if that is not enough it is an error.
        shrink: dampen more than ``percdamp`` where the tokens say too little.
        act_order: quantize columns of high energy first (the artifact stays in natural order).
        floors: simpler methods of quantkit_kernels that no output row may fall behind in the Hessian norm.
        device: torch device of the matrix products.
    """

    group_size: int = 32
    percdamp: float = 0.01
    max_percdamp: float = 1.0
    shrink: bool = True
    act_order: bool = True
    floors: tuple[str, ...] = ("rtn",)
    device: str = "cpu"


@dataclass(frozen=True, slots=True, eq=False)
class Calibrated:
    """One calibrated weight and what it cost.

    Attributes:
        weight: the INT4 weight in the artifact's format; ``error`` and ``energy`` as in quantkit_kernels.
        hessian_error: sum over output rows of e H e^T, H as given (not dampened).
        floor_errors: the same for each of the settings' floors on the whole weight.
        floor_weight_errors: squared error of each floor's weight, whatever the inputs.
        fold_scale: what was moved from up to down before (``awq.py``), so that neither is the source's any more;
            None without a fold.
        fold_alpha: the exponent it was made with.
        rows_from_floor: output rows that took a floor's codes.
        tokens: tokens of the Hessian.
        routed: those of them that the router sent to the expert, where it learned from all; else None.
        percdamp: dampening used, as a share of the mean diagonal.
        attempts: 1, or more if dampening had to be raised.
        form: how the Hessian was used: ``dense`` or ``low-rank`` (GPTQ), ``diagonal`` (AWQ), ``none`` if there
            were no inputs or all were zero (then GPTQ is plain rounding), ``unused`` for a retry by ``mse``.
        retry: the try that gave it under the quality budget (``retry.py``); None: the first.
    """

    weight: Int4Weight
    hessian_error: float
    floor_errors: dict[str, float]
    rows_from_floor: int
    tokens: int
    percdamp: float
    attempts: int
    form: str
    retry: str | None = None
    floor_weight_errors: dict[str, float] = field(default_factory=dict)
    fold_scale: NDArray[np.float32] | None = None
    fold_alpha: float | None = None
    routed: int | None = None

    def float32(self) -> NDArray[np.float32]:
        """The numbers ``[O, I]`` that the INT4 weight stands for."""
        import quantkit_kernels as kernels

        return kernels.int4_to_float32(self.weight.packed, self.weight.scale, 8 * self.weight.packed.shape[1])


def gptq(
    weights: Sequence[NDArray[np.float32]], hessian: Hessian, settings: GptqSettings | None = None
) -> list[Calibrated]:
    """Quantize weights that share their inputs (gate and up of an expert) with one factorisation.

    Args:
        weights: float32 ``[O, I]`` each; O may differ.
        hessian: of their inputs.
        settings: default GptqSettings().

    Raises:
        UsageError: no weight, or one with other columns than the Hessian.
        ValueError: the group size does not divide the columns, or a floor is unknown.
        SourceError: a Hessian that stays singular.
        quantkit_kernels.NonFiniteError: a weight is NaN or infinite.
    """
    import numpy as np

    import quantkit_kernels as kernels

    settings = settings or GptqSettings()
    check_weights(weights, hessian)
    factor = factorise(
        hessian,
        percdamp=settings.percdamp,
        max_percdamp=settings.max_percdamp,
        shrink=settings.shrink,
        act_order=settings.act_order,
        device=settings.device,
    )
    weight = np.concatenate(weights) if len(weights) > 1 else np.ascontiguousarray(weights[0])
    importance = (hessian.diagonal().to(settings.device) + factor.damp).cpu().numpy()
    start = kernels.float_to_int4(weight, settings.group_size, "mse", importance=importance)
    found, norms = _swept(weight, start, factor)
    return finish(weights, weight, found, norms, hessian, settings, factor)


def finish(
    parts: Sequence[NDArray[np.float32]],
    weight: NDArray[np.float32],
    found: Int4Weight,
    norms: NDArray[np.float64],
    hessian: Hessian,
    settings: GptqSettings,
    factor: Factor | None,
) -> list[Calibrated]:
    """Apply the floors to ``found``, whose rows have the Hessian norms ``norms``, and cut it into its parts."""
    import numpy as np

    import quantkit_kernels as kernels

    floors: dict[str, NDArray[np.float64]] = {}
    weight_errors: dict[str, NDArray[np.float64]] = {}
    from_floor = np.zeros(weight.shape[0], bool)
    for floor in settings.floors:
        other = kernels.float_to_int4(weight, settings.group_size, floor)
        floors[floor] = hessian_norms(weight, other, hessian, settings.device)
        weight_errors[floor] = other.error.sum(axis=1, dtype=np.float64)
        is_better = floors[floor] < norms
        if is_better.any():
            for name in ("packed", "scale", "error"):
                getattr(found, name)[is_better] = getattr(other, name)[is_better]
            norms, from_floor = np.minimum(norms, floors[floor]), from_floor | is_better
    form = factor.form if factor else "diagonal" if bool(hessian.diagonal().any()) else "none"
    results, first = [], 0
    for part in parts:
        rows = slice(first, first + part.shape[0])
        first = rows.stop
        results.append(
            Calibrated(
                weight=kernels.Int4Weight(
                    found.packed[rows], found.scale[rows], found.error[rows], found.energy[rows]
                ),
                hessian_error=float(norms[rows].sum()),
                floor_errors={name: float(e[rows].sum()) for name, e in floors.items()},
                rows_from_floor=int(from_floor[rows].sum()),
                tokens=hessian.tokens,
                percdamp=factor.percdamp if factor else 0.0,
                attempts=factor.attempts if factor else 0,
                form=form,
                floor_weight_errors={name: float(e[rows].sum()) for name, e in weight_errors.items()},
            )
        )
    return results


def hessian_norms(
    weight: NDArray[np.float32], quantized: Int4Weight, hessian: Hessian, device: str = "cpu"
) -> NDArray[np.float64]:
    """e H e^T of each output row ``[O]`` for any INT4 version of a weight."""
    import numpy as np
    import torch

    import quantkit_kernels as kernels

    back = kernels.int4_to_float32(quantized.packed, quantized.scale, weight.shape[1])
    errors = torch.from_numpy(np.subtract(weight, back, out=back)).to(device)
    found: NDArray[np.float64] = hessian.norms(errors).cpu().numpy()
    return found


def _swept(
    weight: NDArray[np.float32], start: Int4Weight, factor: Factor
) -> tuple[Int4Weight, NDArray[np.float64]]:
    """The weight with the scales of ``start`` and the codes of the sweep, and e H e^T of each row."""
    import numpy as np
    import torch

    import quantkit_kernels as kernels

    outputs, columns = weight.shape
    num_groups = start.scale.shape[1]
    size = columns // num_groups
    device = factor.order.device
    scale = torch.from_numpy(kernels.bf16_to_float32(start.scale)).to(device).T.contiguous()  # [G, O]
    swept = compensate(
        torch.from_numpy(weight).to(device).T.contiguous()[factor.order], scale, factor.order // size, factor
    )
    codes = torch.empty(columns, outputs, dtype=torch.uint8, device=device)
    codes[factor.order] = swept.codes
    pairs = codes.T.reshape(outputs, columns // 2, 2)
    packed = (pairs[..., 0] | (pairs[..., 1] << 4)).contiguous().cpu().numpy().view(np.int32)
    squares = torch.empty_like(swept.errors)
    squares[factor.order] = swept.errors.square()
    squares = squares.reshape(num_groups, size, outputs)
    while squares.shape[1] > 1:  # the order of the sum is that of quantkit_kernels
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    error = squares[:, 0].T.contiguous().cpu().numpy()
    norms: NDArray[np.float64] = swept.norms.cpu().numpy()
    return kernels.Int4Weight(packed, start.scale, error, start.energy), norms


def check_weights(weights: Sequence[NDArray[np.float32]], hessian: Hessian) -> None:
    """Refuse weights that do not fit the Hessian, with a UsageError."""
    import numpy as np

    if not weights:
        raise UsageError("no weights", where=hessian.where, accepted="one or more with the same inputs")
    for weight in weights:
        if weight.ndim != 2 or weight.shape[1] != hessian.columns or weight.dtype != np.float32:
            raise UsageError(
                f"weight of shape {list(weight.shape)}, {weight.dtype}",
                where=hessian.where,
                accepted=f"float32 [outputs, {hessian.columns}], the columns of its Hessian",
            )
