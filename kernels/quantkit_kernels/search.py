"""The quantization methods: a grid of scales to search, and whether the scale that is stored is the unbiased one.

Per group, the candidates are ``bf16_rne(float32(absmax / 7.5) * factor)``; the candidate s with the smallest
summed squared error wins, the earlier one on a tie, and the codes q are those of s. ``rtn`` has the one factor 1
(FORMAT section 3) and stores s. ``mse`` has 41, the first of which is 1.

**The unbiased scale.** Least squares shrinks: at its optimum sum(q s W) = sum((q s)^2), so the stored weights
have less energy than W, and the output of a matrix falls short of the true one by about its squared relative
error: 0.7 to 1 %, in every expert alike. Noise averages out over columns and layers, a common gain doesn't. So
``mse`` stores, with the codes of s, the scale s' whose projection on W is right, sum(q s' W) = sum(W^2):
``s' = bf16_rne(s * (sum(t^2) / sum(q t)))`` with t = W / s, in which nothing under- or overflows. A group in which
that would cost more than rtn's error keeps s (some 5 %), so that no group of ``mse`` is worse than rtn's.

What it buys over storing s: the KL divergence of the bundled models to their FP8 selves falls by 3 to 7 % (part of
the bundled text ``calib``, every group size, 2.6 to 8.5 standard errors), for 0.3 to 0.5 % more weight error and 3
to 5 % more time. Tried and no better: the unbiased scale within the search (one more sum per candidate), one
common factor per row, and no exception for groups worse than rtn's.

s' is a positive number whenever s is: a q has the sign of its t, so sum(q t) >= 0, and it is 0 only where all q
are 0, where s stays. The largest t of a group lies in 6.2 to 10.8 (3.1 to 16.1 where s is a bf16 subnormal), so
the quotient lies in 1/2 to 2.5 (to 6), and s below 2^126.

With an importance of columns s is stored: whoever calibrates rounds onto that grid himself, against an error that
counts the gain already.

Why 1.2 down to 0.7 in steps of 1/80 (41 candidates): summed squared error of the search relative to rtn (FP8
experts of the bundled tiny-glm; normal weights and weights from Student's t with 3 degrees of freedom, through
FP8 block 128):

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

from dataclasses import dataclass

import numpy as np

from .types import F32


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """How the scale of a group is found.

    Attributes:
        factors: float32 ``[C]``, the candidates; the first is 1.
        is_unbiased: whether the unbiased scale is stored in place of the best candidate.
    """

    factors: F32
    is_unbiased: bool


def _mse_factors() -> F32:
    return np.asarray([1.0, *(k / 80 for k in range(96, 55, -1) if k != 80)], dtype=np.float32)


METHODS: dict[str, Method] = {
    "rtn": Method(np.ones(1, dtype=np.float32), is_unbiased=False),
    "mse": Method(_mse_factors(), is_unbiased=True),
}
for _method in METHODS.values():
    _method.factors.setflags(write=False)


def method_of(method: str) -> Method:
    """The method of this name.

    Raises:
        ValueError: unknown method.
    """
    try:
        return METHODS[method]
    except KeyError:
        raise ValueError(f"unknown method {method!r}; known: {', '.join(METHODS)}") from None
