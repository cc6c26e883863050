"""From the logits of a step to the next tokens, or one error, per sequence: between the arrays and the sampler.

Where drafts were computed, the token that follows each of them is chosen as well, as if it were known already; the
first one that differs from the draft in its place is the last that counts. So drafts change how many tokens a step
gives, and never which.

Touches nothing of the pool or the scheduler, so that requests can be aborted meanwhile.

Legend: n rows of logits, V columns.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

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
        tokens: none: there was none to be chosen, or ``error`` says why, and ``error_status`` whose fault that is
            (``Output``).
        logprobs: of the tokens, if asked for.
        prompt_logprobs: that its rows gave.
        drafts: proposed behind the tokens (``speculation``).
    """

    rows: Rows
    tokens: list[int] = field(default_factory=list)
    error: str | None = None
    error_status: int = 500
    logprobs: SequenceOf[TokenLogprob] = ()
    prompt_logprobs: SequenceOf[TokenLogprob] = ()
    drafts: SequenceOf[int] = ()


def choose(logits: NDArray[np.float32], rows: SequenceOf[Rows], eos: frozenset[int]) -> list[Chosen]:
    """Choose for all runs whose sequences still run.

    Args:
        logits: float32 ``[n, V]``.
        rows: which of them are whose.
        eos: the model's end tokens.
    """
    good = is_finite(logits).tolist()
    chosen = [Chosen(r) for r in rows if r.run.sequence.state is State.RUNNING]
    for one in chosen:
        r = one.rows
        if not all(good[r.start : r.start + r.num_prompt + min(r.num_sampled, 1)]):
            one.error = "the model computed a logit that is not a finite number"
    fine = [one for one in chosen if one.error is None]
    _sample(logits, good, [one for one in fine if one.rows.num_sampled], eos)
    _add_logprobs(logits, fine)
    return chosen


def _sample(logits: NDArray[np.float32], good: list[bool], chosen: list[Chosen], eos: frozenset[int]) -> None:
    draws: list[Draw] = []
    places: list[int] = []
    ready: list[tuple[Chosen, int]] = []
    for one in chosen:
        start = one.rows.start + one.rows.num_prompt
        own = good[start : start + one.rows.num_sampled]
        count = len(own) if all(own) else own.index(False)  # what isn't a number is an error if it comes first
        try:
            draws += [_draw(one.rows.run.sequence, eos, ahead) for ahead in range(count)]
        except GrammarFailed as failed:
            one.error, one.error_status = str(failed), 400
            continue
        places += range(start, start + count)
        ready.append((one, count))
    if places != list(range(len(logits))):
        logits = logits[places]
    found = iter(sample(logits, draws))
    for one, count in ready:
        _keep(one, [next(found) for _ in range(count)])


def _keep(one: Chosen, tokens: list[int | None]) -> None:
    """Up to the first that is not what was proposed for its place."""
    drafts = one.rows.run.drafts
    for place, token in enumerate(tokens):
        if token is None:
            if place == 0:
                one.error, one.error_status = "no token is allowed here", 400
            return
        one.tokens.append(token)
        if place < len(drafts) and token != drafts[place]:
            return


def _draw(sequence: Sequence, eos: frozenset[int], ahead: int) -> Draw:
    return Draw(
        sequence.request.params,
        seed=sequence.seed,
        position=len(sequence.tokens) + ahead,
        counts=sequence.counts,
        prompt=sequence.request.prompt,
        forbidden=tuple(forbidden(sequence, eos, ahead)),
        allowed=None if sequence.matcher is None else sequence.matcher.allowed(),
    )


def _add_logprobs(logits: NDArray[np.float32], chosen: list[Chosen]) -> None:
    chosen = [
        one for one in chosen
        if one.rows.num_prompt or one.rows.run.sequence.request.params.logprobs is not None
    ]  # fmt: skip
    if not chosen:
        return
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
        if params.logprobs is not None:
            places += range(r.start + r.num_prompt, r.start + r.num_prompt + len(one.tokens))
            tokens += one.tokens
            tops += [params.logprobs] * len(one.tokens)
    if not places:
        return
    found = iter(logprobs(logits[places], tokens, tops))
    for one in chosen:
        one.prompt_logprobs = [next(found) for _ in range(one.rows.num_prompt)]
        if one.rows.run.sequence.request.params.logprobs is not None:
            one.logprobs = [next(found) for _ in one.tokens]
