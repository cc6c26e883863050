"""The scale grid of each quantization method: a method *is* its grid.

Per group, the candidates are ``bf16_rne(float32(absmax / 7.5) * factor)``; the candidate with the smallest
summed squared error wins, the earlier one on a tie. ``rtn`` has the one factor 1 (FORMAT section 3), and ``mse``
can never be worse than it, because 1 is its first candidate.

Why 1.2 down to 0.7 in steps of 1/80 (41 candidates): summed squared error relative to rtn (FP8 experts of the
bundled tiny-glm; normal weights and weights from Student's t with 3 degrees of freedom, through FP8 block 128):

===================  ====  ============  ============  ============
grid                 n     tiny-glm      normal        t, 3 d.f.
                           g32    g128   g32    g128   g32    g128
===================  ====  =====  =====  =====  =====  =====  =====
1.0 .. 0.7, 1/80     25    0.851  0.819  0.846  0.821  0.877  0.851
1.08 .. 0.7, 1/25    10    0.829  0.827  0.826  0.829  0.855  0.850
1.08 .. 0.7, 1/40    16    0.822  0.821  0.818  0.823  0.851  0.849
1.08 .. 0.6, 1/80    39    0.818  0.818  0.815  0.820  0.850  0.848
1.2 .. 0.7, 1/80     41    0.814  0.818  0.811  0.820  0.849  0.848
1.2 .. 0.7, 1/160    81    0.813  0.817  0.809  0.819  0.848  0.848
1.3 .. 0.3, 1/800    801   0.812  0.817  0.809  0.819  0.848  0.848
===================  ====  =====  =====  =====  =====  =====  =====

Nothing below 0.7 was ever worth its time, factors above 1 matter for small groups (the upper limit 7 is nearer
than -8, and a larger scale may sit better), and steps under 1/80 come near the steps of a bf16 scale (1/256 to
1/128). Time grows with the number of candidates; the error hardly falls after some forty.
"""

from __future__ import annotations

import numpy as np

from .types import F32


def _mse_factors() -> F32:
    return np.asarray([1.0, *(k / 80 for k in range(96, 55, -1) if k != 80)], dtype=np.float32)


METHODS: dict[str, F32] = {"rtn": np.ones(1, dtype=np.float32), "mse": _mse_factors()}
for _factors in METHODS.values():
    _factors.setflags(write=False)


def factors_of(method: str) -> F32:
    """Factors of a method, float32 ``[C]``, the first is 1.

    Raises:
        ValueError: unknown method.
    """
    try:
        return METHODS[method]
    except KeyError:
        raise ValueError(f"unknown method {method!r}; known: {', '.join(METHODS)}") from None
