"""One answer without a server: ``quantkit generate``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quantkit.errors import ArtifactError, UsageError

from ..refusal import Refused
from ..request import FinishReason, Request, SamplingParams
from .assembly import Assembled


@dataclass(frozen=True)
class Answer:
    """Attributes:
    tokens_per_s: of those after the first; None if there are none.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    first_token_s: float
    tokens_per_s: float | None

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def encode(made: Assembled, prompt: str, *, is_chat: bool) -> tuple[int, ...]:
    """Token ids of a prompt, or of a chat with the prompt as its only message.

    Raises:
        UsageError: it is empty, or the model has no chat template.
    """
    tokenizer = made.tokenizer
    try:
        if is_chat:
            text = tokenizer.template().render([{"role": "user", "content": prompt}])
            found = tokenizer.encode(text, add_special_tokens=False)
        else:
            found = tokenizer.encode(prompt, add_special_tokens=True)
    except Refused as refused:
        raise UsageError(str(refused), where="--chat") from None
    if not found:
        raise UsageError("the prompt has no tokens", where="PROMPT")
    return tuple(found)


def generate(
    made: Assembled, prompt: tuple[int, ...], params: SamplingParams, show: Callable[[str], None] = lambda _: None
) -> Answer:
    """The whole answer; ``show`` gets its text as it comes.

    Raises:
        UsageError: the engine refuses the request.
        ArtifactError: the model can't go on (a page check, logits that are not numbers).
    """
    engine = made.engine
    try:
        engine.add(Request("generate", prompt, params))
    except Refused as refused:
        raise UsageError(str(refused), where=refused.param) from None
    text: list[str] = []
    token_ids: list[int] = []
    finish = FinishReason.ABORT
    start = time.perf_counter()
    times = [start]
    while engine.has_work:
        for output in engine.step():
            if output.finish is FinishReason.ERROR:
                raise ArtifactError(output.error or "the answer failed")
            if output.token_ids:
                times.append(time.perf_counter())
            token_ids += output.token_ids
            text.append(output.text)
            show(output.text)
            finish = output.finish or finish
    first, last = times[min(1, len(times) - 1)], times[-1]
    rate = (len(token_ids) - 1) / (last - first) if len(token_ids) > 1 else None
    return Answer("".join(text), token_ids, finish.value, len(prompt), first - start, rate)
