"""How far models move from a reference on the same text: KL divergence, top-1 agreement, flips.

Perplexity averages over gains and losses; these don't. All models see a batch before the next one is made, so
the reference runs once for any number of candidates and no logits are kept. All figures are means of one value per
block with standard errors over blocks.

Legend: B blocks, T predicted tokens per block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .perplexity import BATCH_BLOCKS, Perplexity, batches, block_nll, log_probs
from .statistics import Mean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One model against the reference, on the same blocks.

    Attributes:
        block_kl: mean over tokens of KL(reference || model) in nats, for each block.
        agreement: share of tokens for which both put the same token first.
        lost: share of tokens that the reference's first choice gets right and the model's does not.
        gained: the other direction; ``lost`` and ``gained`` together are the flips.
        perplexity: of the model.
        reference: perplexity of the reference.
        nll_difference: mean NLL of the model minus the reference's, paired by block; positive is worse.
    """

    block_kl: tuple[float, ...]
    agreement: Mean
    lost: Mean
    gained: Mean
    perplexity: Perplexity
    reference: Perplexity

    @property
    def kl(self) -> Mean:
        """Mean over tokens of KL(reference || model) in nats."""
        return Mean.of(self.block_kl)

    def kl_difference(self, other: Fidelity) -> Mean:
        """This model's KL minus another candidate's on the same blocks, paired; negative is better than it."""
        return Mean.of([a - b for a, b in zip(self.block_kl, other.block_kl, strict=True)])

    @property
    def nll_difference(self) -> Mean:
        return self.perplexity.difference(self.reference)


@dataclass(slots=True)
class _Tally:
    """One value per block of each figure."""

    kl: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    gained: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)


def fidelity(
    reference: Any, candidates: Mapping[str, Any], blocks: NDArray[np.int64], *, batch_blocks: int = BATCH_BLOCKS
) -> dict[str, Fidelity]:
    """Compare models of transformers with a reference on blocks ``[B, T]`` of token ids.

    Args:
        reference: the model that is right by definition, usually the FP8 weights in BF16 arithmetic.
        candidates: label -> model with the same vocabulary.
        blocks: token ids (``token_blocks``).
        batch_blocks: blocks run at once; changes memory, and results only by rounding.

    Raises:
        UsageError: no blocks, or logits that are not finite.
        ValueError: a candidate's vocabulary differs from the reference's.
    """
    reference_nll: list[float] = []
    tallies = {label: _Tally() for label in candidates}
    for batch_BT in batches(blocks, batch_blocks):
        ref_BTV = log_probs(reference, batch_BT)
        reference_nll += block_nll(ref_BTV, batch_BT)
        for label, model in candidates.items():
            _add(tallies[label], label, ref_BTV, log_probs(model, batch_BT), batch_BT)
    num_tokens = blocks.shape[0] * (blocks.shape[1] - 1)
    reference_perplexity = Perplexity(tuple(reference_nll), num_tokens)
    return {
        label: Fidelity(
            block_kl=tuple(t.kl),
            agreement=Mean.of(t.agreement),
            lost=Mean.of(t.lost),
            gained=Mean.of(t.gained),
            perplexity=Perplexity(tuple(t.nll), num_tokens),
            reference=reference_perplexity,
        )
        for label, t in tallies.items()
    }


def _add(tally: _Tally, label: str, ref_BTV: Any, new_BTV: Any, batch_BT: Any) -> None:
    """Reduce one batch of log-probabilities to a value per block."""
    if ref_BTV.shape != new_BTV.shape:
        raise ValueError(f"{label}: vocabulary {new_BTV.shape[-1]}, the reference has {ref_BTV.shape[-1]}")
    kl_BT = (ref_BTV.exp() * (ref_BTV - new_BTV)).sum(-1).double()
    ref_top_BT, new_top_BT, truth_BT = ref_BTV.argmax(-1), new_BTV.argmax(-1), batch_BT[:, 1:]
    ref_right_BT, new_right_BT = ref_top_BT == truth_BT, new_top_BT == truth_BT

    def per_block(values_BT: Any) -> list[float]:
        return [float(x) for x in values_BT.double().mean(-1)]

    tally.kl += per_block(kl_BT)
    tally.agreement += per_block(ref_top_BT == new_top_BT)
    tally.lost += per_block(ref_right_BT & ~new_right_BT)
    tally.gained += per_block(~ref_right_BT & new_right_BT)
    tally.nll += block_nll(new_BTV, batch_BT)
