"""What all endpoints share: the engine, the tokenizer, the settings, and the name of the model."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from ..engine.limits import Limits
from ..request import Request, SamplingParams
from ..service import Service
from .answers import Answers
from .errors import LOGGER, ApiError
from .gate import Gate
from .metrics import Meter
from .sampling import nth
from .settings import HttpSettings
from .sse import DONE, EventStream, event
from .tokenizer import Tokenizer


class Context:
    """One per app."""

    def __init__(self, service: Service, tokenizer: Tokenizer, settings: HttpSettings) -> None:
        self.service, self.tokenizer, self.settings = service, tokenizer, settings
        self.names = settings.served_names or (service.facts.name,)
        self.created = int(time.time())
        self.limits = Limits.of(service.facts, service.config)
        self.meter = Meter(service, self.names[0])
        self.gate = Gate()
        self._is_stopped = False

    @property
    def max_tokens(self) -> int:
        """Of prompt and answer together: what clients size their prompts by."""
        return self.limits.max_tokens(0)

    async def stop(self) -> None:
        """Stop the engine, once; what still runs ends with ABORT."""
        if not self._is_stopped:
            self._is_stopped = True
            await self.service.stop()

    def check_model(self, name: str | None) -> None:
        """
        Raises:
            ApiError: 404, it isn't served here.
        """
        if name is not None and name not in self.names:
            served = ", ".join(self.names)
            raise ApiError(
                404, f"The model `{name[:200]}` does not exist. Served here: {served}", param="model",
                code="model_not_found",
            )  # fmt: skip

    def answers(
        self, reply_id: str, prompts: Sequence[tuple[Sequence[int], SamplingParams]], n: int, salt: str | None
    ) -> Answers:
        """Of n choices to each prompt, in the order of OpenAI's index: all of the first prompt first."""
        requests = [
            Request(
                f"{reply_id}-{at * n + choice}",
                tuple(tokens),
                nth(params, choice),
                cache_salt=salt or "",
                deadline_s=self.settings.request_timeout_s,
            )
            for at, (tokens, params) in enumerate(prompts)
            for choice in range(n)
        ]
        return Answers(self.service, requests, self.meter)

    def check_choices(self, prompts: int, n: int) -> None:
        """
        Raises:
            ApiError: 400, too many at once.
        """
        most = self.settings.max_choices
        if prompts * n > most:
            raise ApiError(
                400,
                f"{prompts} prompts with n = {n} are {prompts * n} answers; at most {most} are accepted",
                param="n",
            )


class Head(TypedDict):
    """What every reply and every chunk of it starts with."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None


def head(context: Context, kind: str, prefix: str, model: str | None) -> Head:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model or context.names[0],
        "system_fingerprint": context.settings.fingerprint,
    }


def reply(head: Head, body: dict[str, Any]) -> Response:
    return JSONResponse({**head, **body}, headers={"X-Request-Id": head["id"]})


def stream(head: Head, answers: Answers, chunks: AsyncIterator[dict[str, Any]]) -> EventStream:
    """Events of the chunks; a failure after the status has gone out is an event too."""

    async def events() -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield event({**head, **chunk})
        except ApiError as error:
            yield event(error.body())
        except Exception:
            LOGGER.exception("streaming of %s failed", head["id"])
            yield event(ApiError(500, "the server failed on this request; its log says why").body())
        yield DONE

    found = EventStream(events(), answers.close)
    found.headers["X-Request-Id"] = head["id"]
    return found
