"""What is scored, and what scoring gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pair:
    """A continuation, token by token, behind its context.

    Attributes:
        context: token ids, at least one.
        continuation: token ids, at least one.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.context) + len(self.continuation)


@dataclass(frozen=True, slots=True)
class Scored:
    """A pair's score.

    Attributes:
        logprob: natural logarithm of the continuation's probability.
        is_greedy: every token of it is the most likely one at its place.
        num_decoded: tokens of it whose distribution a decode step gave.
    """

    logprob: float
    is_greedy: bool
    num_decoded: int = 0


class NotFinite(Exception):
    """Logits that are not numbers; who knows what was scored says so to the user.

    Attributes:
        pair, offset: index of the pair, and token of its continuation, that they were made for.
    """

    def __init__(self, pair: int, offset: int) -> None:
        super().__init__(f"the model's logits are not numbers (token {offset} of the continuation)")
        self.pair, self.offset = pair, offset


class AnswerFailed(Exception):
    """An answer that the model could not go on with (logits that are not numbers); names no item, as above.

    Attributes:
        prompt: its index.
    """

    def __init__(self, prompt: int, why: str) -> None:
        super().__init__(why)
        self.prompt = prompt


class PromptRefused(Exception):
    """What can't be answered or scored as it is asked (a schema that can't be enforced); names no item, as above.

    Attributes:
        prompt: its index.
    """

    def __init__(self, prompt: int, why: str) -> None:
        super().__init__(why)
        self.prompt = prompt


def check_vocabulary(pairs: Sequence[Pair], size: int) -> None:
    """
    Raises:
        PromptRefused: a pair has a token that a model of so many doesn't know.
    """
    for index, pair in enumerate(pairs):
        largest = max((*pair.context, *pair.continuation))
        if largest >= size:
            raise PromptRefused(
                index, f"has the token {largest}, the model knows {size}: the tokenizer is another model's"
            )
