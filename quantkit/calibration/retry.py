"""Further tries at a weight that lost more than the quality budget allows, in a fixed order.

The budget counts the error of the weight, which GPTQ trades for a smaller error of the output. So each try goes
towards the weight itself: first ten times the dampening, which compensates less (not for AWQ, which compensates
nothing), then ``mse``, the least error of the weight that its scales allow. The first try within the limit is
taken; if none is, the one with the least error, for the layer's verdict to speak of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from .gptq import Calibrated, GptqSettings, gptq, hessian_norms
from .hessian import Hessian

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quantkit_kernels import Int4Weight

Over = Callable[[str, "Int4Weight"], float]  # projection, result -> its relative error minus its limit
MORE_DAMPENING = 10.0


def retried(
    result: Calibrated, weight: NDArray[np.float32], hessian: Hessian, settings: GptqSettings,
    over: Callable[[Int4Weight], float],
) -> Calibrated:  # fmt: skip
    """``result`` if it is within its limit, else the result of a further try, which ``Calibrated.retry`` names.

    Args:
        weight: what was quantized, float32 ``[O, I]``.
        hessian, settings: by which it was.
        over: relative error minus limit.

    Raises:
        SourceError: as ``gptq``.
    """
    if over(result.weight) <= 0:
        return result
    percdamp = MORE_DAMPENING * (result.percdamp or settings.percdamp)
    damped = replace(settings, percdamp=percdamp, max_percdamp=max(percdamp, settings.max_percdamp))
    tries: list[tuple[str, Callable[[], Calibrated]]] = [("mse", lambda: _plain(weight, hessian, settings))]
    if result.attempts:
        tries.insert(0, ("dampening", lambda: gptq([weight], hessian, damped)[0]))
    done = [result]
    for name, make in tries:
        done.append(replace(make(), retry=name))
        if over(done[-1].weight) <= 0:
            return done[-1]
    return min(done, key=lambda found: over(found.weight))


def _plain(weight: NDArray[np.float32], hessian: Hessian, settings: GptqSettings) -> Calibrated:
    """``mse`` on the whole weight, with the figures of a calibrated one."""
    import quantkit_kernels as kernels

    names = {"mse", *settings.floors}
    found = {name: kernels.float_to_int4(weight, settings.group_size, name) for name in names}
    norms = {name: float(hessian_norms(weight, w, hessian, settings.device).sum()) for name, w in found.items()}
    return Calibrated(
        weight=found["mse"],
        hessian_error=norms["mse"],
        floor_errors={name: norms[name] for name in settings.floors},
        rows_from_floor=0,
        tokens=hessian.tokens,
        percdamp=0.0,
        attempts=1,
        form="unused",
        floor_weight_errors={name: float(found[name].error.sum(dtype="float64")) for name in settings.floors},
    )
