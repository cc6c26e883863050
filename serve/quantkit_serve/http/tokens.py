"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from starlette.responses import JSONResponse
from typing_extensions import TypedDict

from .chat import chat_text
from .context import Context
from .errors import ApiError
from .logprobs import name
from .schemas.tokens import DetokenizeRequest, TokenizeRequest

INLINE_TOKENS = 4096  # some 1 ms to write


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(TypedDict):
    prompt: str


async def tokenize(context: Context, body: TokenizeRequest) -> JSONResponse:
    """
    Raises:
        ApiError, Refused: the request can't be served.
    """
    context.check_model(body.model)
    is_chat = body.prompt is None
    if body.prompt is not None:
        text = body.prompt
    else:
        text = await chat_text(context, body.messages or (), body)
    special = not is_chat if body.add_special_tokens is None else body.add_special_tokens
    tokens = await context.tokenizer.encoded(text, add_special_tokens=special)

    def reply() -> JSONResponse:
        wanted = tokens if body.return_token_strs else ()
        strings = [name(context.tokenizer.token_bytes(token)) for token in wanted]
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": context.max_tokens,
                "tokens": tokens,
                "token_strs": strings if body.return_token_strs else None,
            }
        )

    return reply() if len(tokens) <= INLINE_TOKENS else await context.tokenizer.aside(reply)


async def detokenize(context: Context, body: DetokenizeRequest) -> JSONResponse:
    """
    Raises:
        ApiError: 404 for the model, 400 for ids that it doesn't have.
    """
    context.check_model(body.model)
    size = context.service.facts.vocab_size
    if (most := max(body.tokens, default=0)) >= size:
        raise ApiError(400, f"tokens has {most}; ids are from 0 to {size - 1}", param="tokens")
    return JSONResponse({"prompt": await context.tokenizer.decoded(body.tokens)})
