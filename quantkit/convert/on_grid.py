"""INT4 codes of weights that another quantizer has rounded already: read off its grid, never rounded again.

Other tools hand back the dequantized numbers and the scale of each group. The nearest code is the one they meant
as long as the numbers were rounded to bfloat16 and the scale from float16 at most: together that moves a number by
less than 0.07 of a step, so one that lies further off is no number of the grid and an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import EnvironmentProblem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quantkit_kernels import Int4Weight

TOLERANCE = 0.1  # of a step


def int4_on_grid(
    weight: NDArray[np.float32], rounded: NDArray[np.float32], scale: NDArray[np.uint16], where: str
) -> Int4Weight:
    """Pack what another tool made of a weight.

    Args:
        weight: float32 ``[O, I]``, the source's own numbers; ``error`` and ``energy`` are of them.
        rounded: float32 ``[O, I]``, code times scale as the tool gave it.
        scale: bfloat16 bits ``[O, G]``, of groups of I / G columns; of either sign.
        where: name of the weight, for errors.

    Raises:
        EnvironmentProblem: a shape, a number that is not finite, or one that is on no grid of these scales.
    """
    import numpy as np

    import quantkit_kernels as kernels

    rows, columns = weight.shape
    if rounded.shape != weight.shape or scale.shape[0] != rows or columns % scale.shape[1] or columns % 8:
        raise _not_ours(
            f"shapes {list(rounded.shape)} and {list(scale.shape)} of a {rows} x {columns} weight", where
        )
    scales = kernels.bf16_to_float32(scale)[..., None]
    groups = (rows, scale.shape[1], columns // scale.shape[1])
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(scales == 0, rounded.reshape(groups), rounded.reshape(groups) / scales)
    codes = np.rint(steps)
    if not np.isfinite(steps).all() or not np.isfinite(scales).all():
        raise _not_ours("NaN or infinity", where)
    if np.abs(steps - codes).max() > TOLERANCE or codes.min() < -8 or codes.max() > 7:
        raise _not_ours("numbers that are not codes from -8 to 7 times their scale", where)
    exact = weight.reshape(groups)
    error = _summed(np.square(exact - codes * scales))
    nibbles = (codes.reshape(rows, columns // 2, 2) + 8).astype(np.uint8)
    packed = (nibbles[..., 0] | nibbles[..., 1] << 4).view("<i4")
    return kernels.Int4Weight(packed, scale, error, _summed(np.square(exact)))


def _summed(squares: NDArray[np.float32]) -> NDArray[np.float32]:
    """``[O, G, size]`` -> ``[O, G]``, in the order of quantkit_kernels."""
    while squares.shape[-1] > 1:
        half = squares.shape[-1] // 2
        squares = squares[..., :half] + squares[..., half:]
    return squares[..., 0]


def _not_ours(what: str, where: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"the engine returned {what}", where=where, accepted="symmetric INT4 in groups",
        hint="Its version is not one that quantkit knows: install the one of constraints.txt, or use --engine "
        "quantkit.",
    )  # fmt: skip
