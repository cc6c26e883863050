"""How far models move from a reference on the same text: KL divergence, top-1 agreement, flips.

Perplexity averages over gains and losses; these don't. All models see a batch before the next one is made, so
the reference runs once for any number of candidates and no logits are kept. Means and quantiles come with standard
errors over blocks. Logits stay in the model's dtype; float32 is used for a few positions at a time.

Legend: B blocks, T predicted tokens per block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .perplexity import BATCH_BLOCKS, Perplexity, batches, block_nll, log_probs, next_logits, row_slices
from .statistics import Mean, Quantile

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
        token_kl: KL of every token, float64 ``[B, T]``.
    """

    block_kl: tuple[float, ...]
    agreement: Mean
    lost: Mean
    gained: Mean
    perplexity: Perplexity
    reference: Perplexity
    token_kl: NDArray[np.float64] = field(repr=False, compare=False)

    @property
    def kl(self) -> Mean:
        """Mean over tokens of KL(reference || model) in nats."""
        return Mean.of(self.block_kl)

    def kl_quantile(self, q: float) -> Quantile:
        """Quantile of the tokens' KL: 0.5 is the median, 0.99 says how bad the worst hundredth is at least."""
        return Quantile.of(self.token_kl, q)

    def kl_difference(self, other: Fidelity) -> Mean:
        """This model's KL minus another candidate's on the same blocks, paired; negative is better than it."""
        return Mean.of([a - b for a, b in zip(self.block_kl, other.block_kl, strict=True)])

    @property
    def nll_difference(self) -> Mean:
        return self.perplexity.difference(self.reference)


class _Tally:
    """Values of every token, one array ``[T]`` per block."""

    def __init__(self) -> None:
        self.rows: dict[str, list[NDArray[np.float64]]] = {k: [] for k in ("kl", "same", "lost", "gained", "nll")}

    def means(self, figure: str) -> tuple[float, ...]:
        return tuple(float(row.mean()) for row in self.rows[figure])


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
    import numpy as np

    reference_nll: list[float] = []
    tallies = {label: _Tally() for label in candidates}
    for batch_BT in batches(blocks, batch_blocks):
        ref_BTV = next_logits(reference, batch_BT)
        reference_nll += block_nll(ref_BTV, batch_BT, type(reference).__name__)
        for label, model in candidates.items():
            new_BTV = next_logits(model, batch_BT)
            if ref_BTV.shape != new_BTV.shape:
                raise ValueError(f"{label}: vocabulary {new_BTV.shape[-1]}, the reference has {ref_BTV.shape[-1]}")
            for block in zip(ref_BTV, new_BTV, batch_BT[:, 1:], strict=True):
                _add(tallies[label], label, *block)
    num_tokens = blocks.shape[0] * (blocks.shape[1] - 1)
    reference_perplexity = Perplexity(tuple(reference_nll), num_tokens)
    return {
        label: Fidelity(
            block_kl=t.means("kl"),
            agreement=Mean.of(t.means("same")),
            lost=Mean.of(t.means("lost")),
            gained=Mean.of(t.means("gained")),
            perplexity=Perplexity(t.means("nll"), num_tokens),
            reference=reference_perplexity,
            token_kl=np.stack(t.rows["kl"]),
        )
        for label, t in tallies.items()
    }


def _add(tally: _Tally, label: str, ref_TV: Any, new_TV: Any, truth_T: Any) -> None:
    """Reduce the logits of one block to values per token, a few tokens at a time."""
    import torch

    found: dict[str, list[Any]] = {name: [] for name in tally.rows}
    for rows in row_slices(ref_TV.shape[1], len(truth_T)):
        ref, new, truth = log_probs(ref_TV[rows], "the reference"), log_probs(new_TV[rows], label), truth_T[rows]
        ref_top, new_top = ref.argmax(-1), new.argmax(-1)
        found["kl"].append((ref.exp() * (ref - new)).sum(-1))
        found["same"].append(ref_top == new_top)
        found["lost"].append((ref_top == truth) & (new_top != truth))
        found["gained"].append((ref_top != truth) & (new_top == truth))
        found["nll"].append(-new.gather(-1, truth[:, None]).squeeze(-1))
    for name, parts in found.items():
        tally.rows[name].append(torch.cat(parts).double().cpu().numpy())
