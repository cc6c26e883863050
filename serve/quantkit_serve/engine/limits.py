"""What is taken at all: a request against the model and the configuration, a configuration against the model.

Everything that would fail later, in the middle of a step or never, is refused here, naming the parameter, the
value and what is accepted.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.errors import UsageError

from ..batch import ModelFacts
from ..config import EngineConfig
from ..refusal import Refused
from ..request import Request, SamplingParams

MAX_LOGPROBS = 20  # as OpenAI's
MAX_BIAS = 100.0  # as OpenAI's
MAX_PENALTY = 2.0  # as OpenAI's
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_SEED = 1 << 64
MAX_FLOAT = sys.float_info.max


@dataclass(frozen=True)
class Limits:
    """Sizes that requests are held against.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: tokens of prompt and answer.
        max_stored: tokens that the whole pool holds.
    """

    vocab_size: int
    max_model_len: int
    max_stored: int

    @classmethod
    def of(cls, facts: ModelFacts, config: EngineConfig) -> Limits:
        """
        Raises:
            UsageError: the configuration can't work with this model.
        """
        check_config(config, facts)
        return cls(
            facts.vocab_size,
            config.scheduler.max_model_len or facts.max_model_len,
            num_pages(facts, config) * config.cache.page_size,
        )

    def max_tokens(self, num_prompt: int) -> int:
        """The most that can be asked for with such a prompt; not above 0 if the prompt doesn't fit itself."""
        return min(self.max_model_len, self.max_stored + 1) - num_prompt

    def check(self, request: Request) -> None:
        """
        Raises:
            Refused: it can't be served.
        """
        _check_tokens("prompt", request.prompt, self.vocab_size)
        if not request.prompt:
            raise Refused("prompt is empty; it needs at least one token", param="prompt")
        check_params(request.params, self.vocab_size)
        try:
            request.cache_salt.encode()
        except UnicodeEncodeError:
            raise Refused("cache_salt has half a character (a lone surrogate)", param="cache_salt") from None
        deadline = request.deadline_s
        if deadline is not None and not (math.isfinite(deadline) and deadline > 0):
            raise Refused(f"deadline_s must be a positive number of seconds, got {deadline}", param="deadline_s")
        self._check_length(len(request.prompt), request.params.max_tokens)

    def _check_length(self, prompt: int, wanted: int) -> None:
        if prompt > self.max_model_len:
            raise Refused(
                f"the prompt has {prompt} tokens; this model takes at most {self.max_model_len}", param="prompt"
            )
        if prompt > self.max_stored:
            raise Refused(
                f"the prompt has {prompt} tokens; the KV cache of this server holds {self.max_stored}",
                param="prompt",
            )
        room = self.max_tokens(prompt)
        if wanted > room:
            limit = (
                f"this model takes {self.max_model_len} tokens of prompt and answer together"
                if self.max_model_len <= self.max_stored
                else f"the KV cache of this server holds {self.max_stored} tokens"
            )
            raise Refused(
                f"max_tokens is {wanted}, but a prompt of {prompt} tokens leaves room for {room}: {limit}",
                param="max_tokens",
            )


def num_pages(facts: ModelFacts, config: EngineConfig) -> int:
    """Of the pool."""
    return config.cache.kv_bytes // facts.page_bytes


def check_config(config: EngineConfig, facts: ModelFacts) -> None:
    """
    Raises:
        UsageError: naming the setting.
    """
    cache, scheduler = config.cache, config.scheduler
    for name, value, least in (
        ("page_size", cache.page_size, 1),
        ("max_num_seqs", scheduler.max_num_seqs, 1),
        ("max_num_batched_tokens", scheduler.max_num_batched_tokens, 1),
        ("decode_steps_between_chunks", scheduler.decode_steps_between_chunks, 1),
        ("max_waiting", scheduler.max_waiting, 0),
        ("num_speculative_tokens", config.model.num_speculative_tokens, 1),
        ("max_model_len", 1 if scheduler.max_model_len is None else scheduler.max_model_len, 1),
    ):
        if value < least:
            raise UsageError(f"is {value}", where=name, accepted=f"at least {least}")
    if scheduler.max_model_len is not None and scheduler.max_model_len > facts.max_model_len:
        raise UsageError(
            f"is {scheduler.max_model_len}, but the model was trained for {facts.max_model_len} positions",
            where="max_model_len",
        )
    if num_pages(facts, config) < 1:
        raise UsageError(
            f"is {cache.kv_bytes}, less than one page",
            where="kv_bytes",
            accepted=f"at least {facts.page_bytes} bytes, for {cache.page_size} tokens",
        )


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """
    Raises:
        Refused: a value out of its range.
    """
    _check_int("max_tokens", params.max_tokens, 0)
    _check_int("min_tokens", params.min_tokens, 0, params.max_tokens)
    _check_int("top_k", params.top_k, 0)
    if params.seed is not None:
        _check_int("seed", params.seed, -(MAX_SEED >> 1), MAX_SEED - 1)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None:
            _check_int(name, count, 0, min(MAX_LOGPROBS, vocab_size))
    _check_float("temperature", params.temperature, 0, MAX_FLOAT)
    _check_float("top_p", params.top_p, 0, 1, above=True)
    _check_float("min_p", params.min_p, 0, 1)
    _check_float("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_float("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_float("repetition_penalty", params.repetition_penalty, 0, MAX_PENALTY, above=True)
    _check_tokens("logit_bias", params.logit_bias, vocab_size)
    for bias in params.logit_bias.values():
        _check_float("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
    _check_tokens("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_stops(params.stop)
    if params.grammar is not None:
        # its end tokens are the only way to end what is complete, so nothing may forbid or ignore them
        for name in ("ignore_eos", "min_tokens"):
            if getattr(params, name):
                raise Refused(f"{name} can't be combined with {params.grammar.param}", param=name)


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise Refused(f"stop has {len(stops)} strings; at most {MAX_STOPS} are accepted", param="stop")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise Refused(
                f"a stop string must have 1 to {MAX_STOP_CHARS} characters, got {len(stop)}", param="stop"
            )


def _check_int(name: str, value: int, least: int, most: int | None = None) -> None:
    accepted = f"at least {least}" if most is None else f"from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused(f"{name} must be a whole number {accepted}, got {value!r}", param=name)
    if value < least or (most is not None and value > most):
        raise Refused(f"{name} must be {accepted}, got {value}", param=name)


def _check_float(name: str, value: float, least: float, most: float, *, above: bool = False) -> None:
    """NaN and infinities are in no range; the comparisons are exact for whole numbers of any size."""
    inside = isinstance(value, int | float) and not isinstance(value, bool) and value <= most
    if not inside or not (least < value if above else least <= value):
        start = f"above {least:g}" if above else f"at least {least:g}"
        end = "" if most == MAX_FLOAT else f" and at most {most:g}"
        raise Refused(f"{name} must be a number {start}{end}, got {value!r}", param=name)


def _check_tokens(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise Refused(f"{name} has the token {token!r}; ids are from 0 to {vocab_size - 1}", param=name)
