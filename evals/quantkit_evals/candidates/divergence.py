"""How far a candidate's distributions are from the baseline's, token by token, from steps made in lockstep.

Both sides of a step are reduced at once, a few rows at a time, so no logits are kept however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..perplexity import row_slices
from .pair import NotFinite

if TYPE_CHECKING:
    from .pair import Pair
    from .scorer import Row, Step

Floats = NDArray[np.float64]
FIGURES = ("kl", "top1_agreement", "lost", "gained", "nll")


class Divergence:
    """Figures of every token of every pair.

    Attributes:
        values: figure -> for each pair float64, one for each token of its continuation: ``kl`` (nats, of the
            baseline's distribution to the candidate's), ``top1_agreement`` (both put the same token first),
            ``lost`` (the baseline's first choice is the text's token, the candidate's is not), ``gained`` (the
            other direction), ``nll`` (nats, of the text's token).
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs
        self.values = {name: [np.full(len(p.continuation), np.nan) for p in pairs] for name in FIGURES}

    def add(self, baseline: Step, candidate: Step) -> None:
        """Take note of a step.

        Raises:
            ValueError: the two are not the same step of two models with one vocabulary.
            NotFinite: a row of the candidate's is not a distribution.
        """
        if baseline.rows != candidate.rows or baseline.logits.shape != candidate.logits.shape:
            raise ValueError("the steps are not in lockstep")
        rows = baseline.rows
        for chunk in row_slices(baseline.logits.shape[-1], len(rows)):
            own = rows[chunk]
            index = torch.tensor([row.row for row in own], dtype=torch.int64)
            truth = torch.tensor([self._pairs[row.pair].continuation[row.offset] for row in own])
            figures = _figures(baseline.logits[index], candidate.logits[index], truth)
            _check(figures["nll"] + figures["kl"], own)
            for name, found in figures.items():
                for row, value in zip(own, found.double().tolist(), strict=True):
                    self.values[name][row.pair][row.offset] = value


def _figures(old_RV: Tensor, new_RV: Tensor, truth_R: Tensor) -> dict[str, Tensor]:
    old, new = old_RV.float().log_softmax(-1), new_RV.float().log_softmax(-1)
    old_top, new_top = old.argmax(-1), new.argmax(-1)
    return {
        "kl": (old.exp() * (old - new)).sum(-1),
        "top1_agreement": (old_top == new_top).float(),
        "lost": ((old_top == truth_R) & (new_top != truth_R)).float(),
        "gained": ((old_top != truth_R) & (new_top == truth_R)).float(),
        "nll": -new.gather(-1, truth_R[:, None]).squeeze(-1),
    }


def _check(figures: Tensor, rows: Sequence[Row]) -> None:
    is_finite = torch.isfinite(figures)
    if not bool(is_finite.all()):
        row = rows[int(torch.argmin(is_finite.int()))]
        raise NotFinite(row.pair, row.offset)
