"""What is scored, and what scoring gives."""

from __future__ import annotations

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


class PromptRefused(Exception):
    """A prompt that can't be answered as it is asked (a schema that can't be enforced); names no item, as above.

    Attributes:
        prompt: its index.
    """

    def __init__(self, prompt: int, why: str) -> None:
        super().__init__(why)
        self.prompt = prompt
