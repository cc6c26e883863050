"""Perplexity over blocks of held-out tokens.

Logits are made for a few blocks at a time and reduced at once, so memory does not grow with the text. They stay in
the model's dtype; float32 copies, in which cross-entropy is computed, are made of a few positions at a time, so a
vocabulary of 150,000 costs no gigabytes. Every token of a block but the
first is predicted, from the tokens of its own block only.

Legend: B blocks, T tokens per block, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.errors import UsageError

from .statistics import Mean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BATCH_BLOCKS = 8
CHUNK_ELEMENTS = 4 << 20  # logits in float32 at once


@dataclass(frozen=True, slots=True)
class Perplexity:
    """How well a model predicts a text.

    Attributes:
        block_nll: mean negative log-likelihood per predicted token (nats), for each block.
        num_tokens: predicted tokens in all blocks.
    """

    block_nll: tuple[float, ...]
    num_tokens: int

    @property
    def nll(self) -> Mean:
        """Mean negative log-likelihood per token in nats."""
        return Mean.of(self.block_nll)

    @property
    def value(self) -> float:
        return math.exp(self.nll.value)

    @property
    def stderr(self) -> float:
        """Standard error of the perplexity over blocks, to first order: ``exp(nll) * stderr(nll)``.

        It tells how far another text of this kind may differ. Two models on the same blocks are compared by their
        paired difference (``difference``), which is far more precise.
        """
        return self.value * self.nll.stderr

    def difference(self, reference: Perplexity) -> Mean:
        """Mean NLL of this model minus the reference's on the same blocks, with the paired standard error.

        Raises:
            ValueError: the two were not measured on the same number of blocks.
        """
        if len(self.block_nll) != len(reference.block_nll):
            raise ValueError(f"{len(self.block_nll)} blocks against {len(reference.block_nll)}")
        return Mean.of([a - b for a, b in zip(self.block_nll, reference.block_nll, strict=True)])


def perplexity(model: Any, blocks: NDArray[np.int64], *, batch_blocks: int = BATCH_BLOCKS) -> Perplexity:
    """Perplexity of a causal language model of transformers on blocks ``[B, T]`` of token ids.

    Raises:
        UsageError: no blocks, or the model's logits are not finite.
    """
    nll: list[float] = []
    for batch in batches(blocks, batch_blocks):
        nll += block_nll(next_logits(model, batch), batch, type(model).__name__)
    return Perplexity(tuple(nll), blocks.shape[0] * (blocks.shape[1] - 1))


def batches(blocks: NDArray[np.int64], batch_blocks: int) -> Iterator[Any]:
    """Consecutive torch tensors of at most ``batch_blocks`` blocks."""
    import torch

    if blocks.ndim != 2 or not blocks.size:
        raise UsageError(
            f"blocks of shape {list(blocks.shape)}", where="blocks", accepted="[blocks, tokens], not empty"
        )
    for start in range(0, len(blocks), batch_blocks):
        yield torch.from_numpy(blocks[start : start + batch_blocks])


def next_logits(model: Any, batch_BT: Any) -> Any:
    """Logits ``[B, T-1, V]`` of every next token, in the model's dtype; position t predicts token t+1."""
    import torch

    with torch.inference_mode():
        return model(input_ids=batch_BT, use_cache=False).logits[:, :-1]


def row_slices(vocabulary: int, num_rows: int) -> Iterator[slice]:
    """Runs of positions whose float32 log-probabilities are few enough to be held at once."""
    step = max(1, CHUNK_ELEMENTS // vocabulary)
    return (slice(start, start + step) for start in range(0, num_rows, step))


def log_probs(logits_TV: Any, who: str) -> Any:
    """Log-probabilities float32 of a few positions.

    Raises:
        UsageError: logits that are NaN or infinite, since every figure made of them would be a lie.
    """
    import torch

    logits_TV = logits_TV.float()
    if not torch.isfinite(logits_TV).all():
        raise UsageError("the model's logits are not finite", where=who)
    return logits_TV.log_softmax(-1)


def block_nll(logits_BTV: Any, batch_BT: Any, who: str) -> list[float]:
    """Mean negative log-likelihood of each block's next tokens."""
    import torch

    found = []
    for logits_TV, truth_T in zip(logits_BTV, batch_BT[:, 1:], strict=True):
        parts = [
            -log_probs(logits_TV[rows], who).gather(-1, truth_T[rows, None]).squeeze(-1)
            for rows in row_slices(logits_TV.shape[1], len(truth_T))
        ]
        found.append(float(torch.cat(parts).double().cpu().numpy().mean()))
    return found
