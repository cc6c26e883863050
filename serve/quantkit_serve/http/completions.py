"""POST /v1/completions: plain prompts, several at once, also to be scored (``echo`` with ``logprobs``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.responses import Response
from typing_extensions import TypedDict

from ..request import SamplingParams, TokenLogprob
from . import logprobs
from .answers import Answer, Answers
from .context import Context, Head, head, reply, stream
from .errors import ApiError
from .sampling import Room, sampling_params
from .schemas.completions import CompletionRequest
from .schemas.fields import Prompt
from .tally import Tally, Usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class Choice(TypedDict):
    index: int
    text: str
    logprobs: logprobs.CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


class Completion(Head):
    choices: list[Choice]
    usage: Usage


@dataclass(frozen=True)
class _Prompt:
    tokens: list[int]
    text: str  # only if it is to be echoed
    params: SamplingParams


def _check(body: CompletionRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is only for stream = true", param="stream_options")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, f"best_of is only supported equal to n, which is {body.n or 1}", param="best_of")


async def answer(context: Context, body: CompletionRequest) -> Response:
    """
    Raises:
        ApiError, Refused: the request can't be served.
    """
    context.check_model(body.model)
    _check(body)
    given: list[Prompt] = body.prompt
    n = body.n or 1
    context.check_choices(len(given), n)
    prompts = [await _prompt(context, body, prompt) for prompt in given]
    start = head(context, "text_completion", "cmpl", body.model)
    answers = context.answers(start["id"], [(p.tokens, p.params) for p in prompts], n, body.cache_salt)
    lengths = [len(p.tokens) for p in prompts]
    texts = [_ChoiceText(context, body, p) for p in prompts for _ in range(n)]
    if not body.stream:
        return _whole(start, Tally(lengths, n), texts, await answers.collected())
    await answers.begin()
    return stream(start, answers, _chunks(answers, texts, Tally(lengths, n, body.stream_options)))


async def _prompt(context: Context, body: CompletionRequest, prompt: Prompt) -> _Prompt:
    await asyncio.sleep(0)  # a thousand short prompts must not hold up the event loop either
    room = Room(context.limits, "prompt")
    special = body.add_special_tokens is not False
    if isinstance(prompt, str):
        tokens = await room.encoded(context.tokenizer, prompt, add_special_tokens=special)
        if not tokens:
            raise ApiError(400, "prompt is empty; it needs at least one token", param="prompt")
    else:
        tokens = prompt
        _check_ids(context, tokens)
    echo = bool(body.echo)
    params = sampling_params(
        body,
        max_tokens=room.tokens(len(tokens), body.max_tokens, default=DEFAULT_MAX_TOKENS, least=0 if echo else 1),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if echo else None,
    )
    text = ""
    if echo:
        text = prompt if isinstance(prompt, str) else await context.tokenizer.decoded(tokens)
    return _Prompt(tokens, text, params)


def _check_ids(context: Context, tokens: Sequence[int]) -> None:
    size = context.service.facts.vocab_size
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= size:
        raise ApiError(
            400, f"prompt has the token {low if low < 0 else high}; ids are from 0 to {size - 1}", param="prompt"
        )


class _ChoiceText:
    """One choice as it grows: the prompt first if it is echoed, logprobs with offsets into the text."""

    def __init__(self, context: Context, body: CompletionRequest, prompt: _Prompt) -> None:
        tokenizer = context.tokenizer
        self._prompt, self._echo = prompt, bool(body.echo)
        self._has_logprobs = body.logprobs is not None
        self._spell = tokenizer.token_bytes
        self._offsets = logprobs.Offsets(tokenizer.token_bytes, tokenizer.is_special)

    def start(
        self, scored: Sequence[TokenLogprob | None] | None
    ) -> tuple[str, logprobs.CompletionLogprobs | None]:
        """What is echoed, with the logprobs of the first output."""
        if not self._echo:
            return "", None
        tokens = self._prompt.tokens
        offsets = self._offsets.of(tokens, self._prompt.text)
        self._offsets.at = len(self._prompt.text)  # a tokenizer may have left something out of the text
        found = None if scored is None else logprobs.completion(tokens, scored, offsets, self._spell)
        return self._prompt.text, found

    def more(self, tokens: Sequence[int], scored: Sequence[TokenLogprob]) -> logprobs.CompletionLogprobs | None:
        if not self._has_logprobs:
            return None
        return logprobs.completion(tokens, scored, self._offsets.of(tokens), self._spell)


def _whole(start: Head, tally: Tally, texts: Sequence[_ChoiceText], answers: Sequence[Answer]) -> Response:
    choices = []
    for index, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        tally.add(index, answer)
        echoed, scored = text.start(answer.prompt_logprobs)
        found = _joined(scored, text.more(answer.token_ids, answer.logprobs))
        choices.append(
            {
                "index": index,
                "text": echoed + answer.text,
                "logprobs": found,
                "finish_reason": answer.finish.value if answer.finish else None,
                "stop_reason": answer.stop_reason,
            }
        )
    return reply(start, {"choices": choices, "usage": tally.usage()})


def _joined(
    first: logprobs.CompletionLogprobs | None, second: logprobs.CompletionLogprobs | None
) -> logprobs.CompletionLogprobs | None:
    if first is None or second is None:
        return first or second
    return {
        "text_offset": first["text_offset"] + second["text_offset"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "tokens": first["tokens"] + second["tokens"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
    }


async def _chunks(answers: Answers, texts: Sequence[_ChoiceText], tally: Tally) -> AsyncIterator[dict[str, Any]]:
    """The echoed prompt of each choice with its first output, its text, one chunk with its end; last the usage."""

    def chunk(index: int, text: str, scored: Any, finish: str | None = None, reason: Any = None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": scored, "finish_reason": finish, "stop_reason": reason}
        return {"choices": [choice], **tally.on_chunk()}

    started: set[int] = set()
    async for index, output in answers.outputs():
        tally.add(index, output)
        if index not in started:
            started.add(index)
            echoed, scored = texts[index].start(output.prompt_logprobs)
            if echoed:
                yield chunk(index, echoed, scored)
        if output.text or output.logprobs:
            yield chunk(index, output.text, texts[index].more(output.token_ids, output.logprobs))
        if output.finish is not None:
            yield chunk(index, "", None, output.finish.value, output.stop_reason)
    if tally.has_last_chunk:
        yield {"choices": [], "usage": tally.usage()}
