"""The DSA indexer over paged keys (``pages.IndexLayout``): scores of every visible position, then an exact top-k.

Legend: T query tokens, Hi indexer heads, L the largest number of visible keys, R rows of the table, P its entries.

score(t, s) = sum over heads of w[t, h] * relu(q[t, h] . k[s]) (DeepSeek-V3.2; GLM-5.x is the same). Factors such
as head_dim^-0.5 and Hi^-0.5 belong into ``head_weights``: they are positive, so relu lets them through. Rotary
embedding, and a Hadamard rotation where a model has one, are done to queries and keys before.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from . import check, table
from .checked_table import CheckedTable, ChosenPositions
from .choice import implementation
from .pages import INDEX_DIM, IndexLayout


def index_scores(
    query: Tensor,
    head_weights: Tensor,
    pages: Tensor,
    layout: IndexLayout,
    block_table: Tensor | CheckedTable,
    rows: Tensor,
    lengths: Tensor,
) -> Tensor:
    """Scores of the keys that each query token sees.

    Args:
        query: bfloat16 ``[T, Hi, 128]``, any strides.
        head_weights: float32 ``[T, Hi]``, any strides.
        pages: uint8 ``[N, page_bytes]``.
        block_table: int32 ``[R, P]``, rows contiguous; entries beyond what is visible may be anything. Or a table
            that was checked for all layers of a step (``checked.py``), then with its ``rows`` and ``visible``.
        rows: int32 ``[T]``, each token's row of the table.
        lengths: int32 ``[T]``, keys that each token sees, from position 0.

    Returns:
        float32 ``[T, L]``, -inf from a token's length on; of a table that is held, L is its capacity. Off exact
            arithmetic by at most 2^-17 of
        sum over h of |w_h| * |q_h| * |k| (float32 sums); NaN where a visible key or the query holds NaN.

    Raises:
        TypeError, ValueError: dtype, shape, device, a row or length outside the table, a page outside the pool;
            the message names the argument.
    """
    IndexLayout.expect(layout)
    layout.check(pages)
    check.tensor("query", query, torch.bfloat16)
    check.shape("query", query, None, None, INDEX_DIM)
    check.same_device("query", query, pages)
    tokens, heads = query.shape[:2]
    check.tensor("head_weights", head_weights, torch.float32)
    check.shape("head_weights", head_weights, tokens, heads)
    check.same_device("head_weights", head_weights, pages)
    held = block_table.capacity if isinstance(block_table, CheckedTable) and block_table.is_held else 0
    block_table, longest = table.rows(block_table, rows, lengths, layout, pages, tokens)
    longest = max(longest, held)
    if not tokens or not longest:
        return query.new_empty((tokens, longest), dtype=torch.float32)
    scores: Tensor = implementation("index", query).index_scores(
        query, head_weights, pages, layout, block_table, rows, lengths, longest
    )
    return scores


@overload
def index_topk(scores: Tensor, lengths: Tensor, k: int) -> Tensor: ...
@overload
def index_topk(scores: Tensor, lengths: CheckedTable, k: int) -> ChosenPositions: ...
def index_topk(scores: Tensor, lengths: Tensor | CheckedTable, k: int) -> Tensor | ChosenPositions:
    """The positions of the k largest of the first ``lengths[t]`` scores of each row, exactly.

    Order of ranks: NaN first (as in torch.topk: a corrupt key gets in and its damage shows, instead of falling out
    silently), then by value, -0 equal to +0; of equals the lower position.

    Args:
        scores: float32 ``[T, N]``, rows contiguous; what lies beyond a row's length does not count.
        lengths: int32 ``[T]``, each in [0, N]. Or the table that the scores are of: its ``visible``.
        k: at least 1; may exceed N.

    Returns:
        int32 ``[T, k]``, positions ascending, then -1; of a table, what attention takes for checked.

    Raises:
        TypeError, ValueError: dtype, shape, device, a length beyond N, ``k`` below 1; the message names the
            argument.
    """
    if isinstance(lengths, CheckedTable):
        return ChosenPositions(_topk_of_table(scores, lengths, k), lengths)
    check.matrix("scores", scores, torch.float32)
    table.lengths("lengths", lengths, scores.shape[0], scores.shape[1], scores)
    return _topk(scores, lengths, k)


def _topk_of_table(scores: Tensor, of: CheckedTable, k: int) -> Tensor:
    check.matrix("scores", scores, torch.float32)
    check.shape("scores", scores, len(of.visible), None)
    check.same_device("scores", scores, of.visible)
    if of.longest > scores.shape[1]:
        raise ValueError(f"lengths go up to {of.longest}, scores have {scores.shape[1]} columns")
    return _topk(scores, of.visible, k)


def _topk(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k must be an int, got {type(k).__name__}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if not scores.numel():
        return lengths.new_full((scores.shape[0], k), -1)
    chosen: Tensor = implementation("index", scores).index_topk(scores, lengths, k)
    return chosen
