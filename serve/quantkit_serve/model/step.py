"""From a ``Batch`` to what layers get of it: tensors, and the checks that come before any page is written.

The kernels check pages and lengths once more, of every layer. What they can't know is checked here: that positions
and lengths belong together, and that a token has a page of its own to go to.

Legend: T tokens of the step, R sequences, S tokens in a page.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..batch import Batch
from .attention import StepContext
from .rope import Rope


def step_context(batch: Batch, page_size: int, vocab_size: int, rope: Rope) -> StepContext:
    """
    Raises:
        ValueError: the batch does not fit together; the message names the array.
    """
    sizes = np.diff(batch.cu_tokens)
    rows = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    _check(batch, sizes, rows, page_size, vocab_size)
    pages = batch.block_table[rows, batch.positions // page_size]
    if (pages < 0).any():
        row = int(rows[np.argmax(pages < 0)])
        raise ValueError(f"block_table[{row}] has no page for a token of the step")
    positions = torch.from_numpy(batch.positions)
    return StepContext(
        phase=batch.phase,
        positions=positions,
        cu_tokens=torch.from_numpy(batch.cu_tokens),
        lengths=torch.from_numpy(batch.lengths),
        block_table=torch.from_numpy(batch.block_table),
        slots=torch.from_numpy(pages.astype(np.int64) * page_size + batch.positions % page_size),
        rows=torch.from_numpy(rows),
        visible=torch.from_numpy((batch.positions + 1).astype(np.int32)),
        is_single=len(rows) == len(sizes) and bool((sizes == 1).all()),
        angles=rope.angles(positions),
        longest=int(batch.lengths.max()),
    )


def _check(
    batch: Batch, sizes: NDArray[np.int32], rows: NDArray[np.int32], page_size: int, vocab_size: int
) -> None:
    tokens = len(batch.token_ids)
    if not tokens or (sizes < 1).any() or batch.cu_tokens[0] != 0 or batch.cu_tokens[-1] != tokens:
        raise ValueError(f"cu_tokens must rise from 0 to the {tokens} tokens, at least one for each sequence")
    # A run is the end of its context: its last token stands at length - 1, the others before it.
    want = batch.lengths[rows] - batch.cu_tokens[1:][rows] + np.arange(tokens)
    if len(batch.positions) != tokens or (batch.positions != want).any() or batch.positions.min() < 0:
        raise ValueError("positions must be the last ones of each sequence's length, in order")
    if batch.positions.max() >= batch.block_table.shape[1] * page_size:
        raise ValueError(f"positions go up to {batch.positions.max()}, beyond the rows of block_table")
    if batch.token_ids.min() < 0 or batch.token_ids.max() >= vocab_size:
        raise ValueError(f"token_ids must lie in [0, {vocab_size})")
    if len(batch.logit_rows) and not 0 <= batch.logit_rows.min() <= batch.logit_rows.max() < tokens:
        raise ValueError(f"logit_rows must be tokens of the step, in [0, {tokens})")
