"""From the logits of a step to one token, or one error, per sequence: between the arrays and the sampler.

Touches nothing of the pool or the scheduler, so that requests can be aborted meanwhile.

Legend: n rows of logits, V columns.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..request import TokenLogprob
from .answering import forbidden
from .batching import Rows
from .grammar import GrammarFailed
from .logprobs import logprobs
from .sampler import Draw, is_finite, sample
from .sequence import Sequence, State


@dataclass
class Chosen:
    """For one run of the step.

    Attributes:
        rows: of the run.
        token: None: none was to be chosen, or ``error`` says why there is none, and ``error_status`` whose fault
            that is (``Output``).
        logprob: of the token, if asked for.
        prompt_logprobs: that its rows gave.
    """

    rows: Rows
    token: int | None = None
    error: str | None = None
    error_status: int = 500
    logprob: TokenLogprob | None = None
    prompt_logprobs: SequenceOf[TokenLogprob] = ()


def choose(logits: NDArray[np.float32], rows: SequenceOf[Rows], eos: frozenset[int]) -> list[Chosen]:
    """Choose for all runs whose sequences still run.

    Args:
        logits: float32 ``[n, V]``.
        rows: which of them are whose.
        eos: the model's end tokens.
    """
    good = is_finite(logits)
    chosen = [Chosen(r) for r in rows if r.run.sequence.state is State.RUNNING]
    for one in chosen:
        r = one.rows
        if not good[r.start : r.start + r.num_prompt + r.is_sampled].all():
            one.error = "the model computed a logit that is not a finite number"
    fine = [one for one in chosen if one.error is None]
    _sample(logits, [one for one in fine if one.rows.is_sampled], eos)
    _add_logprobs(logits, fine)
    return chosen


def _sample(logits: NDArray[np.float32], chosen: list[Chosen], eos: frozenset[int]) -> None:
    draws, ready = [], []
    for one in chosen:
        try:
            draws.append(_draw(one.rows.run.sequence, eos))
            ready.append(one)
        except GrammarFailed as failed:
            one.error, one.error_status = str(failed), 400
    places = [one.rows.start + one.rows.num_prompt for one in ready]
    if places != list(range(len(logits))):
        logits = logits[places]
    for one, token in zip(ready, sample(logits, draws), strict=True):
        one.token = token
        if token is None:
            one.error, one.error_status = "no token is allowed here", 400


def _draw(sequence: Sequence, eos: frozenset[int]) -> Draw:
    return Draw(
        sequence.request.params,
        seed=sequence.seed,
        position=len(sequence.tokens),
        counts=sequence.counts,
        prompt=sequence.request.prompt,
        forbidden=tuple(forbidden(sequence, eos)),
        allowed=None if sequence.matcher is None else sequence.matcher.allowed(),
    )


def _add_logprobs(logits: NDArray[np.float32], chosen: list[Chosen]) -> None:
    places: list[int] = []
    tokens: list[int] = []
    tops: list[int] = []
    for one in chosen:
        r, params = one.rows, one.rows.run.sequence.request.params
        prompt = r.run.sequence.request.prompt
        first = len(r.run.sequence.prompt_logprobs)
        places += range(r.start, r.start + r.num_prompt)
        tokens += prompt[first : first + r.num_prompt]
        tops += [params.prompt_logprobs or 0] * r.num_prompt
        if one.token is not None and params.logprobs is not None:
            places.append(r.start + r.num_prompt)
            tokens.append(one.token)
            tops.append(params.logprobs)
    if not places:
        return
    found = iter(logprobs(logits[places], tokens, tops))
    for one in chosen:
        one.prompt_logprobs = [next(found) for _ in range(one.rows.num_prompt)]
        if one.token is not None and one.rows.run.sequence.request.params.logprobs is not None:
            one.logprob = next(found)
