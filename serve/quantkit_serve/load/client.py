"""One streamed completion of an OpenAI-compatible server, timed.

Everything that goes wrong with a request is part of what is measured: it is returned, not raised. That includes an
answer that ends without ``[DONE]``, carries an error, or doesn't say how many tokens it has (counting pieces of
text instead would give a figure that looks the same and isn't). No proxy is used, since it would be measured too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from quantkit.errors import EnvironmentProblem, UsageError

from .record import Record
from .sse import EventReader

API_KEY = "QUANTKIT_API_KEY"  # environment variable
CONNECT_S = 10.0
_SHOWN = 200  # characters of a server's message
Prompt = str | Sequence[int]


class _Failed(Exception):
    """Why an answer doesn't count."""


@dataclass
class _Answer:
    """What has come of an answer so far."""

    chunks_s: list[float]
    usage: Mapping[str, Any] | None = None
    is_done: bool = False

    def take(self, data: str, now: float) -> None:
        """
        Raises:
            _Failed: the event is an error, or no JSON.
        """
        if data == "[DONE]":
            self.is_done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise _Failed(f"an event is not JSON: {_shortened(data)}") from None
        if not isinstance(event, dict):
            raise _Failed(f"an event is not an object: {_shortened(data)}")
        if event.get("error"):
            raise _Failed(f"error in the stream: {_message(event)}")
        if event.get("choices"):
            self.chunks_s.append(now)
        if isinstance(event.get("usage"), dict):
            self.usage = event["usage"]

    def counts(self) -> tuple[int, int]:
        """Tokens of prompt and answer.

        Raises:
            _Failed: the answer is not whole.
        """
        if not self.is_done:
            raise _Failed("the stream ended without [DONE]")
        if not self.chunks_s:
            raise _Failed("the answer is empty")
        usage = self.usage or {}
        counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not all(isinstance(count, int) for count in counts):
            raise _Failed("the stream has no usage, so nobody knows how many tokens it had")
        return counts  # type: ignore[return-value]


class Client:
    """A server, and the model that is asked of it; use it as an async context manager.

    Args:
        url: of the server, with or without ``/v1``.
        timeout_s: the longest wait for the next piece of an answer.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 600.0, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Accept-Encoding": "identity"}
        if key := os.environ.get(API_KEY):
            if not (key.isascii() and key.isprintable()):  # httpx would show it in its error
                raise UsageError("the key has characters that no HTTP header holds", where=API_KEY)
            headers["Authorization"] = f"Bearer {key}"
        try:
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(timeout_s, connect=CONNECT_S, pool=None),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                trust_env=False,
                transport=transport,
            )
        except httpx.InvalidURL as error:
            raise UsageError(str(error), where="--url") from None
        base = self._http.base_url
        if base.scheme not in ("http", "https") or not base.host or not 0 < (base.port or 80) < 1 << 16:
            raise UsageError(f"{url!r} is no URL", where="--url", accepted="http://HOST:PORT")

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """The one model that the server has.

        Raises:
            EnvironmentProblem: the server can't be reached, or doesn't say.
            UsageError: it has several.
        """
        content = await self._json("GET", "/v1/models")
        rows = content.get("data")
        names = (
            [str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row]
            if isinstance(rows, list)
            else []
        )
        if not names:
            raise EnvironmentProblem(
                "the server names no model", where=f"{self.url}/v1/models", hint="Give --model."
            )
        if len(names) > 1:
            raise UsageError(f"the server has {len(names)} models", where="--model", accepted=", ".join(names))
        return names[0]

    async def tokenize(self, model: str, text: str) -> list[int]:
        """Token ids of a text by the server's own tokenizer (``/tokenize``, vLLM's).

        Raises:
            EnvironmentProblem: the server has no such thing.
        """
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        tokens = (await self._json("POST", "/tokenize", body)).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise EnvironmentProblem("the answer has no token ids", where=f"{self.url}/tokenize", hint=_NO_TOKENS)
        return tokens

    async def complete(self, model: str, prompt: Prompt, max_tokens: int, *, ignores_eos: bool = True) -> Record:
        """Ask for a greedy completion and wait for its end; never raises for what the server does."""
        body: dict[str, Any] = {
            "model": model, "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens, "temperature": 0.0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if ignores_eos:
            body["ignore_eos"] = True
        answer = _Answer([])
        start = time.perf_counter()
        error = None
        counts = 0, 0
        try:
            await self._stream(body, answer)
            counts = answer.counts()
        except _Failed as failed:
            error = str(failed)
        except httpx.HTTPError as failed:
            error = _spoken(failed)
        except UnicodeDecodeError:
            error = "the stream is not UTF-8"
        return Record(start, time.perf_counter(), tuple(answer.chunks_s), *counts, error)

    async def _stream(self, body: dict[str, Any], answer: _Answer) -> None:
        reader = EventReader()
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise _Failed(f"HTTP {response.status_code}: {_message(await response.aread())}")
            async for piece in response.aiter_bytes():
                now = time.perf_counter()
                for data in reader.feed(piece):
                    answer.take(data, now)

    async def _json(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        where = f"{self.url}{path}"
        hint = _NO_TOKENS if path == "/tokenize" else None
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise EnvironmentProblem(_spoken(error), where=where, hint="Does the server run?") from error
        if response.status_code in (401, 403):
            hint = f"Put the server's API key into the environment variable {API_KEY}."
        if response.status_code != httpx.codes.OK:
            raise EnvironmentProblem(
                f"HTTP {response.status_code}: {_message(response.content)}", where=where, hint=hint
            )
        try:
            content = response.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise EnvironmentProblem("the answer is not a JSON object", where=where, hint=hint)
        return content


_NO_TOKENS = "For a server without /tokenize use --prompts random with --vocab-size."


def _message(content: object) -> str:
    """What a server says of an error: OpenAI's ``{"error": {"message": ...}}``, or the text itself."""
    if isinstance(content, bytes):
        text = content.decode(errors="replace")
        try:
            content = json.loads(text)
        except ValueError:
            return _shortened(text) or "no message"
    if isinstance(content, dict):
        content = content.get("error", content)
    if isinstance(content, dict):
        content = content.get("message", content)
    return _shortened(content if isinstance(content, str) else json.dumps(content))


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _spoken(error: httpx.HTTPError) -> str:
    """httpx's timeouts have no text of their own."""
    return f"{type(error).__name__}: {_shortened(str(error))}" if str(error) else type(error).__name__
