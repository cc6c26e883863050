"""The one factorisation of GPTQ: H + damp * I = V V^T with V upper triangular, in dense or in low-rank form.

GPTQ (Frantar et al. 2022) quantizes columns in order and compensates each error in the columns to come, with rows
of the upper Cholesky factor of the inverse Hessian. That takes a Cholesky factor, an inverse and a second Cholesky
factor. The same codes come out of V alone ("The geometry of LLM quantization: GPTQ as Babai's nearest plane
algorithm", Chen et al. 2025): with e_i = w_i - q_i against the *original* weights, the compensated column is ::

    u_j = w_j + (sum over i < j of e_i V_ij) / V_jj

so neither an inverse nor a second factor is ever formed. V comes from the ordinary lower Cholesky factor of H with
rows and columns in reverse order: I^3 / 3 multiply-adds instead of I^3, and the inversion, which loses digits, is
gone. (The upper factor of the inverse would be V^-1, by a triangular inversion; it is not needed.)

**Low rank.** With n tokens X, H = X^T X, and n < I, V is never formed either. For a block B of columns and the
columns F after it, let ::

    M_F  = damp * (X_F X_F^T + damp * I)^-1                       [n, n]; I when there are no columns after B
    S_B  = X_B^T M_F X_B + damp * I = V_B V_B^T                   [b, b]; V_B is the diagonal block of V
    Z_B  = M_F X_B V_B^-T                                         [n, b]
    V_<B = X_<B^T Z_B                                             what is above the diagonal block, never formed
    M_BF = M_F - Z_B Z_B^T                                        by the matrix inversion lemma

One pass from the last block to the first gives all Z_B and V_B; the sweep then carries R = X e (n numbers for each
output row) instead of all errors. This is exact algebra, not an approximation: same codes as the dense form.
Floating-point operations for O output rows, and for gate and up of a GLM-5.2 expert with 512 tokens:

==========  ============================  ================  =============================
form        Hessian and factor            sweep             O = 4096, I = 6144, n = 512
==========  ============================  ================  =============================
dense       2 n I^2 + I^3 / 3             O I^2             39 + 77 + 155 = 271 * 10^9
low rank    4 n^2 I                       4 O n I           6 + 52 = 58 * 10^9
==========  ============================  ================  =============================

which is why tokens are kept up to I / 4 (``hessian.LOW_RANK_RATIO``), where the two sweeps cost the same.

**Dampening** is ``percdamp`` times the mean of the diagonal, and more where the tokens say too little: with rho of
``Hessian.shrinkage``, H + rho / (1 - rho) * mean(diag H) * I is H shrunk towards the identity but for a factor,
which changes nothing here. GPTQ with a fixed share fits the noise of few tokens: mean KL divergence of tiny-glm to
its FP8 weights as a share of rtn's (g32, 48 blocks of held-out text, standard error about 0.03; I = 256):

=========================  =====  =====  =====  =====
tokens per expert             48    128    512   4096
=========================  =====  =====  =====  =====
1 %                         1.39   1.19   0.70   0.53
10 %                           -   0.86   0.65   0.54
50 %                        0.73   0.69   0.60      -
**1 % or shrinkage**        0.75   0.69   0.60   0.53
=========================  =====  =====  =====  =====

With the default calibration set a GLM-5.2 expert has a sixth as many tokens as columns: the left of the table. If
a factorisation fails all the same, it is tried again with ten times as much, up to ``max_percdamp``; the result
says which share was used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.errors import SourceError

from .hessian import LOW_RANK_RATIO, Hessian

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128  # columns compensated at once


class NotPositiveError(Exception):
    """A matrix has no Cholesky factor in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """V of one Hessian, columns in the order ``order``.

    Attributes:
        order: int64 ``[I]``, the column at each place.
        diagonal: float32 ``[I]``, diagonal of V.
        blocks: float32 ``[b, b]`` each, the upper triangular diagonal blocks of V.
        matrix: float32, V itself ``[I, I]`` in the dense form, the tokens X ``[n, I]`` in the low-rank form.
        coupling: float32 ``[n, I]``, the Z_B side by side; None in the dense form.
        damp: what was added to the diagonal of H.
        percdamp: the same as a share of the mean of the diagonal.
        attempts: 1, or more if dampening had to be raised.
    """

    order: Tensor
    diagonal: Tensor
    blocks: tuple[Tensor, ...]
    matrix: Tensor
    coupling: Tensor | None
    damp: float
    percdamp: float
    attempts: int

    @property
    def form(self) -> str:
        """``dense``, ``low-rank``, or ``none`` for a Hessian of zeros."""
        if self.coupling is None:
            return "dense"
        return "low-rank" if self.matrix.shape[0] else "none"


def factorise(
    hessian: Hessian,
    *,
    percdamp: float = 0.01,
    max_percdamp: float = 1.0,
    shrink: bool = True,
    act_order: bool = True,
    device: str = "cpu",
) -> Factor:
    """Factorise a Hessian with dampening.

    Args:
        hessian: inputs of the linear; none or all zero gives the identity, that is plain rounding.
        percdamp: least dampening as a share of the mean of the diagonal.
        max_percdamp: the largest share that shrinkage or a retry may use.
        shrink: dampen more where the tokens say too little.
        act_order: columns in order of falling energy (ties in natural order) instead of natural order.
        device: torch device of the result.

    Raises:
        SourceError: no dampening up to ``max_percdamp`` made the Hessian positive definite.
    """
    import torch

    energy = hessian.diagonal().to(device)
    mean = float(energy.double().mean())
    order = torch.arange(hessian.columns, device=device)
    if act_order:
        order = torch.sort(energy, descending=True, stable=True).indices
    if mean == 0.0:
        return _low_rank(torch.zeros(0, hessian.columns, device=device), order, 1.0, percdamp, 1)
    rows = hessian.rows
    form: Callable[[Tensor, Tensor, float, float, int], Factor]
    if rows is not None and rows.shape[0] * LOW_RANK_RATIO <= hessian.columns:
        form, source = _low_rank, rows.to(device)[:, order]
    else:
        form, source = _dense, hessian.dense().to(device)[order][:, order]
    least = percdamp
    if shrink:
        rho = hessian.shrinkage(source if form is _dense else source @ source.T)
        least = max(percdamp, min(rho / max(1.0 - rho, 1e-9), max_percdamp))
    attempt = 0
    while True:
        share = least * 10.0**attempt
        try:
            return form(source, order, share * mean, share, attempt + 1)
        except NotPositiveError:
            attempt += 1
            if least * 10.0**attempt > max_percdamp * (1 + 1e-9):
                raise SourceError(
                    f"Hessian of {hessian.tokens} tokens is not positive definite with dampening {share:g}",
                    where=hessian.where,
                    accepted=f"one that is with dampening up to {max_percdamp:g} of the mean diagonal",
                    hint="Raise max_percdamp, or use mse for this weight.",
                ) from None


def _upper(matrix: Tensor) -> Tensor:
    """Upper triangular V with V V^T = matrix.

    Raises:
        NotPositiveError: there is none in float32.
    """
    import torch

    lower, info = torch.linalg.cholesky_ex(matrix.flip(0, 1))
    if int(info) or not bool(torch.isfinite(lower.diagonal()).all()):
        raise NotPositiveError
    upper: Tensor = lower.flip(0, 1)
    return upper


def _dense(matrix: Tensor, order: Tensor, damp: float, percdamp: float, attempts: int) -> Factor:
    damped = matrix.clone()
    damped.diagonal().add_(damp)
    upper = _upper(damped)
    blocks = tuple(upper[s : s + BLOCK, s : s + BLOCK] for s in range(0, upper.shape[0], BLOCK))
    return Factor(order, upper.diagonal(), blocks, upper, None, damp, percdamp, attempts)


def _low_rank(x: Tensor, order: Tensor, damp: float, percdamp: float, attempts: int) -> Factor:
    import torch

    remaining = torch.eye(x.shape[0], dtype=x.dtype, device=x.device)  # M_F
    coupling = torch.empty_like(x)
    blocks: list[Tensor] = []
    for start in reversed(range(0, x.shape[1], BLOCK)):
        part = x[:, start : start + BLOCK]
        projected = remaining @ part
        inner = part.T @ projected
        inner = (inner + inner.T) * 0.5  # symmetric only up to rounding
        inner.diagonal().add_(damp)
        upper = _upper(inner)
        z = torch.linalg.solve_triangular(upper.T, projected, upper=False, left=False)  # Z V^T = M X
        coupling[:, start : start + BLOCK] = z
        remaining.addmm_(z, z.T, alpha=-1)
        blocks.append(upper)
    blocks.reverse()
    diagonal = torch.cat([b.diagonal() for b in blocks])
    return Factor(order, diagonal, tuple(blocks), x, coupling, damp, percdamp, attempts)
