"""Reference of ``forward/index.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit_kernels.forward.pages import IndexLayout

from .cache import read_index_keys


def index_scores(
    query: Tensor,
    head_weights: Tensor,
    pages: Tensor,
    layout: IndexLayout,
    block_table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    longest: int,
) -> Tensor:
    scores = query.new_full((len(query), longest), -torch.inf, dtype=torch.float32)
    for row in sorted(set(rows.tolist())):
        tokens = (rows == row).nonzero().flatten().tolist()
        keys = read_index_keys(pages, layout, block_table[row], int(lengths[tokens].max()))  # [n, 128]
        for t in tokens:  # one by one: the shape of a product decides the order of its sums
            seen = int(lengths[t])
            heads = torch.relu(query[t].float() @ keys[:seen].T)  # [Hi, seen]
            scores[t, :seen] = head_weights[t] @ heads
    return scores


def index_topk(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    tokens, columns = scores.shape
    position = torch.arange(columns, device=scores.device)
    hidden = position >= lengths[:, None]
    order = scores.masked_fill(hidden, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    first = order[:, :k]
    first = first.masked_fill(first >= lengths[:, None], columns).sort(dim=1).values
    chosen = lengths.new_full((tokens, k), -1)
    chosen[:, : first.shape[1]] = first.masked_fill(first == columns, -1).int()
    return chosen
