"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Literal

from starlette.responses import Response
from typing_extensions import TypedDict

from ..request import TokenLogprob
from . import logprobs
from .answers import Answer, Answers
from .context import Context, Head, head, reply, stream
from .errors import ApiError
from .sampling import Room, sampling_params
from .schemas.chat import ChatRequest, TemplateFields
from .schemas.messages import Message
from .tally import Tally, Usage

Finish = Literal["stop", "length"]


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: logprobs.ChatLogprobs | None
    finish_reason: Finish
    stop_reason: str | int | None


class ChatCompletion(Head):
    choices: list[ChatChoice]
    usage: Usage


async def chat_text(context: Context, messages: Sequence[Message], fields: TemplateFields, **more: Any) -> str:
    """The prompt as the model's template writes it.

    Raises:
        Refused: see ``ChatTemplate.render``.
    """
    tools = [tool.model_dump(exclude_unset=True, exclude_none=True) for tool in fields.tools or ()]
    wanted = fields.add_generation_prompt
    work = partial(
        context.tokenizer.template(has_tools=bool(tools)).render,
        [message.for_template() for message in messages],
        tools=tools,
        add_generation_prompt=True if wanted is None else wanted,
        more={**(fields.chat_template_kwargs or {}), **more},
    )
    return await context.tokenizer.aside(work)  # a template is a program


def _check(body: ChatRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is only for stream = true", param="stream_options")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs = true", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise ApiError(400, "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    if body.tool_choice == "auto" and not body.tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")


async def answer(context: Context, body: ChatRequest) -> Response:
    """
    Raises:
        ApiError, Refused: the request can't be served.
    """
    context.check_model(body.model)
    _check(body)
    n = body.n or 1
    context.check_choices(1, n)
    room = Room(context.limits, "messages")
    if body.tool_choice == "none":
        body = body.model_copy(update={"tools": None})
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    text = await chat_text(context, body.messages, body, **effort)
    tokens = await room.encoded(context.tokenizer, text, add_special_tokens=bool(body.add_special_tokens))
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = sampling_params(
        body,
        max_tokens=room.tokens(len(tokens), wanted),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    start = head(context, "chat.completion.chunk" if body.stream else "chat.completion", "chatcmpl", body.model)
    answers = context.answers(start["id"], [(tokens, params)], n, body.cache_salt)
    if not body.stream:
        return _whole(context, start, Tally([len(tokens)], n), await answers.collected())
    await answers.begin()
    tally = Tally([len(tokens)], n, body.stream_options)
    return stream(start, answers, _chunks(context, answers, n, tally, bool(body.logprobs)))


def _whole(context: Context, start: Head, tally: Tally, answers: Sequence[Answer]) -> Response:
    choices = []
    for index, answer in enumerate(answers):
        tally.add(index, answer)
        choices.append(
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": _logprobs(context, answer.logprobs),
                "finish_reason": answer.finish.value if answer.finish else None,
                "stop_reason": answer.stop_reason,
            }
        )
    return reply(start, {"choices": choices, "usage": tally.usage()})


def _logprobs(context: Context, tokens: Sequence[TokenLogprob]) -> logprobs.ChatLogprobs | None:
    return logprobs.chat(tokens, context.tokenizer.token_bytes) if tokens else None


async def _chunks(
    context: Context, answers: Answers, n: int, tally: Tally, has_logprobs: bool
) -> AsyncIterator[dict[str, Any]]:
    """First the role of each choice, then its text, then one chunk with its end and no text; last the usage."""

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return {"choices": [choice], **tally.on_chunk()}

    for index in range(n):
        yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
    async for index, output in answers.outputs():
        tally.add(index, output)
        if output.text or output.logprobs:
            yield chunk(index, {"content": output.text}, logprobs=_logprobs(context, output.logprobs))
        if output.finish is not None:
            yield chunk(index, {}, finish_reason=output.finish.value, stop_reason=output.stop_reason)
    if tally.has_last_chunk:
        yield {"choices": [], "usage": tally.usage()}
