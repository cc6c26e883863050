"""From the fields of a body to ``SamplingParams``; lengths against what the model and the page pool can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..engine.limits import Limits
from ..refusal import Refused
from ..request import SamplingParams
from .errors import ApiError
from .schemas.sampling import SamplingFields
from .tokenizer import Tokenizer

SEEDS = 1 << 64


def sampling_params(
    body: SamplingFields, *, max_tokens: int, logprobs: int | None = None, prompt_logprobs: int | None = None
) -> SamplingParams:
    """
    Raises:
        Refused: fields that contradict each other.
    """
    wanted = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    plain = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
             "seed", "ignore_eos", "min_tokens")  # fmt: skip
    given = {name: value for name in plain if (value := getattr(body, name)) is not None}
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise Refused(
            f"min_tokens must be at most max_tokens, which is {max_tokens}, got {min_tokens}", param="min_tokens"
        )
    if "" in (body.stop or ()):
        raise Refused("stop must not have an empty string", param="stop")
    return replace(
        wanted,
        **given,
        top_k=max(body.top_k or 0, 0),
        logit_bias=_bias(body.logit_bias or {}),
        stop=tuple(dict.fromkeys(body.stop or ())),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        grammar=body.grammar(),
    )


def nth(params: SamplingParams, index: int) -> SamplingParams:
    """Of the choices of one prompt each draws with a seed of its own."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=(params.seed + index + SEEDS // 2) % SEEDS - SEEDS // 2)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise Refused(f"a key of logit_bias must be a token id, got {key[:40]!r}", param="logit_bias")
    return {int(key): bias for key, bias in given.items()}


class Room:
    """How many tokens an answer may have, in vLLM's words, which clients parse.

    Args:
        limits: of the engine.
        param: the field that holds the prompt.
    """

    def __init__(self, limits: Limits, param: str) -> None:
        self._limits, self._param = limits, param

    def tokens(self, prompt: int, wanted: int | None, *, default: int | None = None, least: int = 1) -> int:
        """Of the answer to a prompt of so many tokens.

        Args:
            wanted: by the client.
            default: if that is None; as many as there is room for if both are.
            least: that may be asked for.

        Raises:
            ApiError: too many or too few.
        """
        room = self._limits.max_tokens(prompt)
        if room < least:
            raise self._error(f"your request has {prompt} input tokens. Please reduce the length of the input.")
        if wanted is None:
            return room if default is None else min(default, room)
        if wanted < least:
            raise ApiError(400, f"max_tokens must be at least {least}, got {wanted}.", param="max_tokens")
        if wanted > room:
            raise self._error(
                f"you requested {prompt + wanted} tokens ({prompt} in the input, {wanted} in the completion). "
                "Please reduce the length of the input or of the completion.",
                param="max_tokens",
            )
        return wanted

    async def encoded(self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokens of a prompt, which may still be too many.

        Raises:
            ApiError: they are for sure, as seen by the length; before any work.
        """
        if tokenizer.fewest_tokens(text) > self._context:
            what = f"your request has {len(text)} characters, which are more tokens than that."
            raise self._error(f"{what} Please reduce the length of the input.")
        return await tokenizer.encoded(text, add_special_tokens=add_special_tokens)

    @property
    def _context(self) -> int:
        """Tokens of prompt and answer."""
        return self._limits.max_tokens(0)

    def _error(self, what: str, *, param: str | None = None) -> ApiError:
        text = f"This model's maximum context length is {self._limits.max_model_len} tokens"
        if self._context < self._limits.max_model_len:
            text += f", and the KV cache of this server holds {self._limits.max_stored}"
        return ApiError(
            400, f"{text}. However, {what}", param=param or self._param, code="context_length_exceeded"
        )
