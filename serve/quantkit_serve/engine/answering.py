"""What a new token means for an answer: its text, and whether the answer ends with it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ..request import FinishReason
from .detokenizer import Detokenizer
from .sequence import Sequence


class Answered(NamedTuple):
    """Text that is certain now, and why the answer ended, if it did; ``Output`` has the same."""

    text: str = ""
    finish: FinishReason | None = None
    stop_reason: str | int | None = None


def end_tokens(sequence: Sequence, eos: frozenset[int]) -> frozenset[int]:
    """Tokens that end this answer and are no part of its text."""
    params = sequence.request.params
    if not params.stop_token_ids:
        return frozenset() if params.ignore_eos else eos
    return params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos


def accept_all(sequence: Sequence, tokens: Iterable[int], eos: frozenset[int]) -> tuple[Answered, int]:
    """Append tokens up to the one that ends the answer; how many these are.

    Raises:
        GrammarFailed: see ``accept``.
    """
    answered, text, count = Answered(), [], 0
    for token in tokens:
        answered = accept(sequence, token, eos)
        text.append(answered.text)
        count += 1
        if answered.finish is not None:
            break
    return (answered if count == 1 else answered._replace(text="".join(text))), count


def accept(sequence: Sequence, token: int, eos: frozenset[int]) -> Answered:
    """Append a token.

    Raises:
        GrammarFailed: the grammar can't go on; the token is not appended.
    """
    params = sequence.request.params
    if token in end_tokens(sequence, eos):
        sequence.append(token)
        reason = token if token in params.stop_token_ids else None
        return _finished(sequence.detokenizer, "", FinishReason.STOP, reason)
    if sequence.matcher is not None:
        sequence.matcher.accept(token)
    sequence.append(token)
    text = sequence.detokenizer.push(token)
    if sequence.detokenizer.stop is not None:
        return Answered(text, FinishReason.STOP, sequence.detokenizer.stop)
    if sequence.matcher is not None and sequence.matcher.is_complete:
        return _finished(sequence.detokenizer, text, FinishReason.STOP, None)
    if sequence.num_generated >= params.max_tokens:
        return _finished(sequence.detokenizer, text, FinishReason.LENGTH, None)
    return Answered(text)


def _finished(detokenizer: Detokenizer, text: str, finish: FinishReason, reason: int | None) -> Answered:
    """The end of the text may complete a stop string, and that is then why it ended."""
    text += detokenizer.finish()
    if detokenizer.stop is not None:
        return Answered(text, FinishReason.STOP, detokenizer.stop)
    return Answered(text, finish, reason)


def forbidden(sequence: Sequence, eos: frozenset[int], ahead: int = 0) -> Collection[int]:
    """Tokens that may not come next, or ``ahead`` tokens later."""
    if sequence.num_generated + ahead >= sequence.request.params.min_tokens:
        return ()
    return end_tokens(sequence, eos)
