"""Logprobs in OpenAI's two shapes.

A token that is not text by itself is written ``bytes:\\xe2\\x80``, as OpenAI does: two such tokens would
otherwise be the same key. A logprob of minus infinity, which JSON doesn't have, is -9999 (vLLM's).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from typing_extensions import TypedDict

from ..request import TokenLogprob

LEAST = -9999.0


class ChatLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(ChatLogprob):
    top_logprobs: list[ChatLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatToken]
    refusal: None


class CompletionLogprobs(TypedDict):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat(tokens: Sequence[TokenLogprob], spell: Callable[[int], bytes]) -> ChatLogprobs:
    def one(token: int, logprob: float) -> ChatLogprob:
        data = spell(token)
        return {"token": name(data), "logprob": max(logprob, LEAST), "bytes": list(data)}

    content: list[ChatToken] = [
        {**one(t.token_id, t.logprob), "top_logprobs": [one(*top) for top in t.top]} for t in tokens
    ]
    return {"content": content, "refusal": None}


class Offsets:
    """Where each token begins in the text of its choice, in characters.

    Args:
        spell: bytes of a token.
        is_hidden: tokens that the text of an answer doesn't show.
    """

    def __init__(self, spell: Callable[[int], bytes], is_hidden: Callable[[int], bool]) -> None:
        self._spell, self._is_hidden = spell, is_hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.at = 0

    def of(self, tokens: Sequence[int], text: str = "") -> list[int]:
        """Of the next tokens.

        Args:
            text: of a prompt, which may have special tokens that a tokenizer didn't add but found.
        """
        found = []
        for token in tokens:
            found.append(self.at)
            data = self._spell(token)
            if not self._is_hidden(token) or (text and text.startswith(data.decode("utf-8", "replace"), self.at)):
                self.at += len(self._decoder.decode(data))
        return found


def completion(
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    offsets: Sequence[int],
    spell: Callable[[int], bytes],
) -> CompletionLogprobs:
    """None stands for the first token of a prompt, which nothing predicts."""
    return {
        "text_offset": list(offsets),
        "token_logprobs": [None if t is None else max(t.logprob, LEAST) for t in logprobs],
        "tokens": [name(spell(token)) for token in tokens],
        "top_logprobs": [None if t is None else _top(t, spell) for t in logprobs],
    }


def _top(token: TokenLogprob, spell: Callable[[int], bytes]) -> dict[str, float]:
    """The most likely ones and, whatever its place, the token itself."""
    found = {name(spell(t)): max(logprob, LEAST) for t, logprob in token.top}
    return {**found, name(spell(token.token_id)): max(token.logprob, LEAST)}
