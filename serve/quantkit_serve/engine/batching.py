"""A plan as the arrays that the runner gets.

Legend: R sequences of the step, T tokens of the step, P entries of a row of the block table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..batch import Batch
from .scheduler import Plan, Run


@dataclass(frozen=True)
class Rows:
    """Which rows of the step's logits belong to a run, and what for.

    Attributes:
        first: of the run's tokens in the step.
        start: of the first of its rows.
        num_prompt: the first of them give logprobs of prompt tokens, each of the token after its own.
        num_sampled: so many more, from which next tokens are chosen: one of the run's last known token, one of
            each of its drafts.
    """

    run: Run
    first: int
    start: int
    num_prompt: int
    num_sampled: int


def _wanted(run: Run) -> tuple[range, bool]:
    """Places in the sequence whose logits give logprobs of the prompt; whether a token follows the run."""
    sequence, start = run.sequence, run.sequence.num_computed
    end = start + run.count
    due = range(0)
    if sequence.has_prompt_logprobs_due:
        due = range(max(start, len(sequence.prompt_logprobs) - 1), min(end, sequence.num_prompt - 1))
    is_last = end == len(sequence.tokens)
    return due, is_last and sequence.request.params.max_tokens > sequence.num_generated


def build(plan: Plan, block_table: NDArray[np.int32]) -> tuple[Batch, list[Rows]]:
    """Arrays of a step; what each run's rows of the logits are for.

    Args:
        plan: R runs.
        block_table: int32 ``[R, P]``, as checked.
    """
    counts = [run.size for run in plan.runs]
    starts = [run.sequence.num_computed for run in plan.runs]
    cu_tokens = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=cu_tokens[1:])
    rows: list[Rows] = []
    logit_rows: list[int] = []
    tokens: list[int] = []
    for run, start, first in zip(plan.runs, starts, cu_tokens.tolist(), strict=False):
        due, is_sampled = _wanted(run)
        num_sampled = 1 + len(run.drafts) if is_sampled else 0
        rows.append(Rows(run, first, len(logit_rows), len(due), num_sampled))
        logit_rows += [first + place - start for place in due]
        logit_rows += range(first + run.count - 1, first + run.count - 1 + num_sampled)
        tokens += run.sequence.tokens[start : start + run.count]
        tokens += run.drafts
    batch = Batch(
        phase=plan.phase,
        token_ids=np.array(tokens, np.int64),
        positions=np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]),
        cu_tokens=cu_tokens,
        lengths=np.array([s + n for s, n in zip(starts, counts, strict=True)], np.int32),
        block_table=block_table,
        logit_rows=np.array(logit_rows, np.int64),
    )
    return batch, rows


def pages_of(plan: Plan, block_table: NDArray[np.int32]) -> NDArray[np.int32]:
    """The pages that a step touches. What follows a sequence's pages in its row may be anything, pages of others
    among it; those must not count as in flight, or a step that is launched meanwhile could not evict them."""
    counts = np.array([len(run.sequence.table) for run in plan.runs])
    return np.asarray(block_table[np.arange(block_table.shape[1]) < counts[:, None]])
