"""What HTTP, commands and tests see of an engine: submit, abort, health, figures. ``engine`` implements it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from .batch import ModelFacts
from .config import EngineConfig
from .request import Output, Request


@dataclass(frozen=True)
class Health:
    """``is_alive``: its loop runs. ``is_stuck``: a step takes longer than it may. ``reason`` in words."""

    is_alive: bool
    is_stuck: bool = False
    reason: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.is_alive and not self.is_stuck


@dataclass(frozen=True)
class Figures:
    """Counts since the start and gauges of now; metrics and the live page read them.

    ``pages`` maps page ids to the owning request or ``cached``, ``quarantined``, ``shared``; free pages are
    left out. ``steps`` are the latest: (start, seconds, phase, sequences, tokens), in seconds since the start.
    """

    num_waiting: int = 0
    num_running: int = 0
    num_pages: int = 0
    num_pages_used: int = 0
    num_pages_cached: int = 0
    num_pages_quarantined: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    kv_tag_checks: int = 0
    kv_tag_mismatches: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    pages: dict[int, str] = field(default_factory=dict)
    steps: tuple[tuple[float, float, str, int, int], ...] = ()


class Service(Protocol):
    """An engine at work in a thread or process of its own; called from one event loop."""

    facts: ModelFacts
    config: EngineConfig

    async def start(self) -> None: ...

    async def stop(self, *, drain_s: float = 0.0) -> None:
        """Take no more, let what runs finish for up to ``drain_s`` seconds, end the rest with ABORT."""

    def submit(self, request: Request) -> AsyncIterator[Output]:
        """The answer as it grows; the last output has ``finish``. Closing the iterator early aborts the request.

        Raises:
            Refused: at once, before the first output, if the request can't be served.
        """

    def abort(self, request_id: str) -> None:
        """Ends it with ABORT; nothing if it has ended."""

    def health(self) -> Health: ...

    def figures(self) -> Figures: ...
