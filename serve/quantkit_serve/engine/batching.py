"""A plan as the arrays that the runner gets.

Legend: R sequences of the step, T tokens of the step, P entries of a row of the block table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..batch import Batch
from .scheduler import Plan, Run
from .sequence import Sequence

_NONE = range(0)


class Rows(NamedTuple):
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


def _due(sequence: Sequence, start: int, end: int) -> range:
    """Places in the sequence, of a run from ``start`` to ``end``, whose logits give logprobs of the prompt."""
    if not sequence.has_prompt_logprobs_due:
        return _NONE
    return range(max(start, len(sequence.prompt_logprobs) - 1), min(end, sequence.num_prompt - 1))


def _has_next(sequence: Sequence, end: int) -> bool:
    """Whether a token follows a run up to ``end``."""
    return end == len(sequence.tokens) and sequence.request.params.max_tokens > sequence.num_generated


def build(plan: Plan, block_table: NDArray[np.int32]) -> tuple[Batch, list[Rows]]:
    """Arrays of a step; what each run's rows of the logits are for.

    Args:
        plan: R runs.
        block_table: int32 ``[R, P]``, as checked.
    """
    counts = np.array([run.size for run in plan.runs])
    starts = np.array([run.sequence.num_computed for run in plan.runs])
    cu_tokens = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=cu_tokens[1:])
    rows: list[Rows] = []
    logit_rows: list[int] = []
    tokens: list[int] = []
    for run, start, first in zip(plan.runs, starts.tolist(), cu_tokens.tolist(), strict=False):
        sequence, count, drafts = run.sequence, run.count, run.drafts
        due = _due(sequence, start, start + count)
        num_sampled = 1 + len(drafts) if _has_next(sequence, start + count) else 0
        rows.append(Rows(run, first, len(logit_rows), len(due), num_sampled))
        if due:
            logit_rows += [first + place - start for place in due]
        logit_rows += range(first + count - 1, first + count - 1 + num_sampled)
        tokens += sequence.tokens[start : start + count]
        tokens += drafts
    batch = Batch(
        phase=plan.phase,
        token_ids=np.array(tokens, np.int64),
        positions=np.repeat(starts - cu_tokens[:-1], counts) + np.arange(len(tokens)),
        cu_tokens=cu_tokens,
        lengths=(starts + counts).astype(np.int32),
        block_table=block_table,
        logit_rows=np.array(logit_rows, np.int64),
    )
    return batch, rows
