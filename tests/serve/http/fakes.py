"""A Service without a model: says a text it was given, in the tokens of the bundled tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

from fastapi import FastAPI

import quantkit
from quantkit_serve.batch import ModelFacts
from quantkit_serve.config import CacheConfig, EngineConfig, SchedulerConfig
from quantkit_serve.engine.limits import Limits
from quantkit_serve.http.app import create_app
from quantkit_serve.http.settings import HttpSettings
from quantkit_serve.http.tokenizer import Tokenizer
from quantkit_serve.refusal import Refused
from quantkit_serve.request import FinishReason, Output, Request, TokenLogprob
from quantkit_serve.service import Figures, Health

MODEL = Path(quantkit.__file__).parent / "data" / "models" / "tiny-glm-5.2-fp8"
CONTEXT = 256
SCRIPT = "The river runs – über alles – to the sea."
PAGE_BYTES = 1000


def scored(token: int, position: int, top: int) -> TokenLogprob:
    """A distribution that a test can compute: the token is the most likely, its neighbours follow."""
    return TokenLogprob(
        token, -0.25 * (position + 1), 1, tuple((token + i, -0.25 * (position + 1) - i) for i in range(top))
    )


class FakeService:
    """Service.

    Attributes:
        requests: all that were submitted.
        live: ids of those that have not ended.
        aborted: ids of those that were.
        refusal: raised by ``submit``.
        error, error_status: end every answer after its first token.
        pause: answers wait for it before the token at ``pause_at``.
        endless: it goes on to max_tokens, slowly.
    """

    def __init__(self, tokenizer: Tokenizer, *, script: str = SCRIPT, kv_pages: int = 100) -> None:
        vocab = tokenizer.raw.get_vocab_size(with_added_tokens=True)
        self.facts = ModelFacts("tiny-glm", vocab, CONTEXT, PAGE_BYTES, "kv-1", frozenset({0}), {"shared": 1})
        self.config = EngineConfig(
            cache=CacheConfig(page_size=4, kv_bytes=kv_pages * PAGE_BYTES), scheduler=SchedulerConfig()
        )
        self.tokenizer = tokenizer
        self.script = tokenizer.encode(script, add_special_tokens=False)
        self.reset()

    def reset(self) -> None:
        """As new."""
        self.requests: list[Request] = []
        self.live: set[str] = set()
        self.aborted: set[str] = set()
        self.refusal: Refused | None = None
        self.error: str | None = None
        self.error_status = 500
        self.pause: asyncio.Event | None = None
        self.pause_at = 0
        self.endless = False
        self.num_starts = self.num_stops = 0
        self.status = Health(is_alive=True)
        self.shown = Figures()

    async def start(self) -> None:
        self.num_starts += 1

    async def stop(self, *, drain_s: float = 0.0) -> None:
        self.num_stops += 1
        self.aborted |= self.live
        if self.pause is not None:
            self.pause.set()

    def submit(self, request: Request) -> AsyncIterator[Output]:
        if self.refusal is not None:
            raise self.refusal
        Limits.of(self.facts, self.config).check(request)
        self.requests.append(request)
        self.live.add(request.request_id)
        return self._outputs(request)

    async def _outputs(self, request: Request) -> AsyncIterator[Output]:
        try:
            async for output in self._spoken(request):
                yield output
        finally:
            self.live.discard(request.request_id)

    async def _spoken(self, request: Request) -> AsyncIterator[Output]:
        params, name = request.params, request.request_id
        scores = None
        if (count := params.prompt_logprobs) is not None:
            rest = (scored(token, i, count) for i, token in enumerate(request.prompt) if i)
            scores = (None, *rest)
        script = self.script * (params.max_tokens if self.endless else 1)
        said = script[: params.max_tokens]
        if not said:
            yield Output(
                name, prompt_logprobs=scores, finish=FinishReason.LENGTH, num_prompt_tokens=len(request.prompt)
            )
            return
        shown = ""
        for at, token in enumerate(said):
            if self.pause is not None and at == self.pause_at:
                await self.pause.wait()
            await asyncio.sleep(0.02 if self.endless else 0)
            if name in self.aborted:
                yield Output(name, finish=FinishReason.ABORT)
                return
            if self.error is not None and at == 1:
                yield Output(name, finish=FinishReason.ERROR, error=self.error, error_status=self.error_status)
                return
            is_last = at + 1 == len(said)
            whole = self.tokenizer.raw.decode(said[: at + 1], skip_special_tokens=True)
            held = whole if is_last else whole.rstrip("�")
            text, shown = held[len(shown) :], held
            finish = None
            if is_last:
                finish = FinishReason.LENGTH if len(said) == params.max_tokens else FinishReason.STOP
            yield Output(
                name,
                (token,),
                text,
                logprobs=() if params.logprobs is None else (scored(token, at, params.logprobs),),
                prompt_logprobs=scores if at == 0 else None,
                finish=finish,
                num_prompt_tokens=len(request.prompt),
                num_cached_tokens=4,
                num_generated_tokens=at + 1,
            )

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        if self.pause is not None:
            self.pause.set()

    def health(self) -> Health:
        return self.status

    def figures(self) -> Figures:
        return self.shown


@cache
def bundled() -> Tokenizer:
    return Tokenizer.load(MODEL)


def make(settings: HttpSettings | None = None, *, script: str = SCRIPT) -> tuple[FakeService, FastAPI]:
    tokenizer = bundled()
    service = FakeService(tokenizer, script=script)
    return service, create_app(service, tokenizer, settings or HttpSettings())
