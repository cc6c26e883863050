"""Usage of a reply, whole or as it grows."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict

from ..request import Output
from .answers import Answer
from .schemas.sampling import StreamOptions


class CachedTokens(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Tally:
    """Counts what the outputs say.

    Args:
        prompts: tokens of each prompt; it counts once, however many choices it has.
        n: choices of each.
        options: what the client of a stream wants to see of it.
    """

    def __init__(self, prompts: list[int], n: int, options: StreamOptions | None = None) -> None:
        options = options or StreamOptions()
        self._prompts, self._n = prompts, n
        self._is_continuous = bool(options.continuous_usage_stats)
        self.has_last_chunk = bool(options.include_usage)
        self._generated = [0] * (len(prompts) * n)
        self._cached = [0] * len(prompts)

    def add(self, index: int, counted: Output | Answer) -> None:
        at = index // self._n
        self._generated[index] = counted.num_generated_tokens
        self._cached[at] = max(self._cached[at], counted.num_cached_tokens)

    def usage(self) -> Usage:
        prompt, completion = sum(self._prompts), sum(self._generated)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    def on_chunk(self) -> dict[str, Any]:
        """For a chunk that isn't the last: OpenAI has null there, and nothing if usage isn't asked for."""
        if self._is_continuous:
            return {"usage": self.usage()}
        return {"usage": None} if self.has_last_chunk else {}
