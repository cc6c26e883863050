"""The sweep of GPTQ over the columns of a weight, given its scales and the factor of its Hessian (``factor.py``).

Everything is laid out columns first, ``[I, O]``: a column of the weight is then contiguous, and a block of columns
is the operand of one matrix product. What earlier blocks did to a block comes from one product per block
(left-looking, so the later columns are not rewritten for every block as in the paper); inside a block, what
earlier sub-blocks did comes from one product per sub-block; only inside a sub-block do columns go one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .factor import BLOCK, Factor

if TYPE_CHECKING:
    from torch import Tensor

SUB_BLOCK = 32  # columns that go one by one between two matrix products inside a block
ROUND = 1.5 * 2.0**23  # adding and subtracting it rounds to nearest even; round_ wakes all threads for a column


@dataclass(frozen=True, slots=True, eq=False)
class Swept:
    """Result of a sweep, columns in the order of the factor.

    Attributes:
        codes: uint8 ``[I, O]``, code + 8, that is 0 to 15.
        errors: float32 ``[I, O]``, weight minus code * scale.
        norms: float64 ``[O]``, e H e^T of each output row, H without dampening.
    """

    codes: Tensor
    errors: Tensor
    norms: Tensor


def compensate(weight: Tensor, scale: Tensor, groups: Tensor, factor: Factor) -> Swept:
    """Quantize columns in order, each after compensation for the errors of those before it.

    Args:
        weight: float32 ``[I, O]``, rows in the order of the factor.
        scale: float32 ``[G, O]``, of each group.
        groups: int64 ``[I]``, the group of each row of ``weight``.
        factor: of the Hessian.
    """
    import torch

    dense = factor.coupling is None
    columns, outputs = weight.shape
    nibbles = torch.empty(columns, outputs, dtype=torch.uint8, device=weight.device)
    errors = torch.empty_like(weight)
    carried = weight.new_zeros(0 if dense else factor.matrix.shape[0], outputs)  # R = X e
    damped = weight.new_zeros(outputs, dtype=torch.float64)
    for index, start in enumerate(range(0, columns, BLOCK)):
        block = slice(start, min(start + BLOCK, columns))
        upper, diagonal = factor.blocks[index], factor.diagonal[block].unsqueeze(1)
        scales = scale[groups[block]]
        if factor.coupling is None:
            target = factor.matrix[:start, block].T @ errors[:start]
        else:
            target = factor.coupling[:, block].T @ carried
        target.div_(diagonal).add_(weight[block])
        codes = torch.empty_like(target)
        _block(weight[block], target, scales, upper / diagonal.T, codes, errors[block])
        nibbles[block] = codes + 8
        if dense:
            damped += target.sub_(codes.mul_(scales)).mul_(diagonal).square_().sum(0)
        else:
            carried.addmm_(factor.matrix[:, block], errors[block])
    if dense:
        norms = (damped - factor.damp * errors.square().sum(0).double()).clamp_(min=0)
    else:
        norms = carried.square_().sum(0, dtype=torch.float64)
    return Swept(nibbles, errors, norms)


def _block(weight: Tensor, target: Tensor, scales: Tensor, unit: Tensor, codes: Tensor, errors: Tensor) -> None:
    """One block ``[b, O]`` in place; ``unit`` is its diagonal block of V with every column divided by V_jj."""
    import torch

    for start in range(0, weight.shape[0], SUB_BLOCK):
        sub = slice(start, min(start + SUB_BLOCK, weight.shape[0]))
        if start:
            target[sub].addmm_(unit[:start, sub].T, errors[:start])
        done = errors[sub].T  # [O, columns of this sub-block]
        weights_of, targets, scales_of = weight[sub].unbind(), target[sub].unbind(), scales[sub].unbind()
        codes_of, errors_of, pushes = codes[sub].unbind(), errors[sub].unbind(), unit[sub, sub].T.contiguous()
        for j, (w, u, s, q, e) in enumerate(zip(weights_of, targets, scales_of, codes_of, errors_of, strict=True)):
            if j:
                torch.addmv(u, done[:, :j], pushes[j, :j], out=u)
            torch.div(u, s, out=q)
            q.clamp_(-8, 7).add_(ROUND).sub_(ROUND)
            torch.mul(q, s, out=e)
            torch.sub(w, e, out=e)
