"""What a server says of a prompt that it scored (``echo``, ``logprobs``), read with suspicion.

A server that speaks the protocol almost gives figures that look right: every number that counts is checked, and
what is none ends the evaluation instead of becoming a score.
"""

from __future__ import annotations

import math
from typing import Any

from quantkit.errors import EnvironmentProblem

from .pair import NotFinite, Pair, Scored

TOPS = 2  # most likely tokens that are asked for: one alone may be two of the same text
_ROUNDING = 1e-2  # a probability of 1 may be told as slightly more
_NO_TEXT = "\ufffd"  # what bytes that are no text by themselves are written as


class SameText(Exception):
    """Tokens are told by their text, and two that are none by themselves may have become one."""


def scored(index: int, pair: Pair, choice: dict[str, Any], url: str) -> Scored:
    """The score of a pair from a choice of the server's answer.

    Args:
        index: of the pair, for ``NotFinite``.

    Raises:
        NotFinite: a token of the continuation has no number.
        EnvironmentProblem: no log-probabilities of the prompt, or of other tokens, or none that can be such.
        SameText: whether a token is the most likely one can't be told.
    """
    logprobs = choice.get("logprobs")
    found = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    tops = logprobs.get("top_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(found, list) or not isinstance(tops, list):
        raise EnvironmentProblem("the endpoint gives no logprobs of prompts (echo)", where=url)
    if len(found) not in (pair.num_tokens, pair.num_tokens + 1):  # it may generate one
        raise EnvironmentProblem(
            f"the endpoint counts {max(len(found) - 1, 0)} tokens, the tokenizer {pair.num_tokens}", where=url,
            hint="It has another tokenizer, or adds tokens to prompts.",
        )  # fmt: skip
    if len(tops) < pair.num_tokens:
        raise EnvironmentProblem(
            f"the endpoint gives {len(found)} token_logprobs and {len(tops)} top_logprobs", where=url
        )
    own = slice(len(pair.context), pair.num_tokens)
    values: list[float] = []
    is_greedy = True
    for offset, (value, top) in enumerate(zip(found[own], tops[own], strict=True)):
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            raise NotFinite(index, offset)
        if not _is_logprob(value):
            raise EnvironmentProblem(f"the endpoint gives no log-probability: {value!r:.60}", where=url)
        if not (isinstance(top, dict) and top and all(map(_is_logprob, top.values()))):
            raise EnvironmentProblem(f"the endpoint gives no top_logprobs: {top!r:.60}", where=url)
        values.append(value)
        is_top = value >= max(top.values())
        if is_top and len(top) < TOPS and _NO_TEXT in next(iter(top)):
            raise SameText
        is_greedy = is_greedy and is_top
    return Scored(math.fsum(values), is_greedy)


def _is_logprob(value: object) -> bool:
    """Whole numbers may have more digits than any float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value <= _ROUNDING and (isinstance(value, float) or value > -(2**53))
