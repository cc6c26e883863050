"""A request and its answer as they cross the border between HTTP (or any caller) and the engine; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Literal


class FinishReason(Enum):
    STOP = "stop"  # an end token, a stop string or a stop token
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # by the caller
    ERROR = "error"  # Output.error says what


@dataclass(frozen=True)
class Grammar:
    """Output that is enforced.

    Attributes:
        source: a JSON schema (text), a regular expression, or empty for any JSON.
        param: the field that asked for it, for refusals.
    """

    kind: Literal["json_object", "json_schema", "regex"]
    source: str = ""
    param: str = field(default="response_format", compare=False)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen; the caller has checked ranges (``engine.limits`` does).

    Attributes:
        max_tokens: of the answer; 0 gives none (to score a prompt).
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        min_p: keeps tokens with at least this share of the best one's probability.
        frequency_penalty, presence_penalty: OpenAI's, over generated tokens.
        repetition_penalty: over prompt and generated tokens (transformers').
        logit_bias: token id -> added to its logit.
        seed: draws depend on it and the position alone; None: a fresh one.
        stop: strings that end the answer and are left out of it.
        stop_token_ids: tokens that do.
        ignore_eos: the model's own end tokens don't.
        logprobs: of how many most likely tokens, besides the chosen one's; None: none at all.
        prompt_logprobs: the same for the prompt.
        grammar: what the answer must be.
        min_tokens: end tokens are not drawn before.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    min_tokens: int = 0

    @cached_property
    def has_penalties(self) -> bool:
        """Logits depend on the tokens that were generated."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)


@dataclass(frozen=True)
class Request:
    """One answer that is wanted.

    Attributes:
        request_id: unique among those in the engine.
        prompt: token ids, at least one.
        params: see ``SamplingParams``.
        cache_salt: requests share prefix pages only with requests of the same salt.
        deadline_s: seconds from submission after which it ends with an error; None: never.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    cache_salt: str = ""
    deadline_s: float | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithms of the model's own distribution, before penalties, bias and temperature .

    Attributes:
        token_id, logprob: of the token at this place.
        rank: 1 for the most likely.
        top: the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """What is new of an answer since the last one.

    Attributes:
        request_id: of the request.
        token_ids: new tokens; their text may still be held back.
        text: new text, whole characters only, without stop strings.
        logprobs: of the new tokens, if asked for.
        prompt_logprobs: once, with the first output, if asked for; None at the first token, which has none.
        finish: why it ended; None while it goes on. Exactly one output of a request has it, the last.
        stop_reason: the stop string or stop token that ended it.
        error: with FinishReason.ERROR.
        error_status: of HTTP: 400 if what was asked for can't be done, 504 after a deadline, else 500.
        num_prompt_tokens, num_cached_tokens, num_generated_tokens: so far.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_status: int = 500
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
