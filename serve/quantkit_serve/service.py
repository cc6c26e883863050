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
    """``is_alive``: its loop runs. ``is_stuck``: a step takes longer than it may. ``is_degraded``: a part of it is
    down and will be back. ``reason`` in words."""

    is_alive: bool
    is_stuck: bool = False
    reason: str | None = None
    is_degraded: bool = False

    @property
    def is_ok(self) -> bool:
        return self.is_alive and not self.is_stuck and not self.is_degraded


HANDOFF_BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip


@dataclass(frozen=True)
class Durations:
    """A histogram: how many durations were up to each of some bounds and above the one before it, the last count
    being of those above all; and their sum."""

    counts: tuple[int, ...] = (0,) * (len(HANDOFF_BOUNDS_S) + 1)
    total_s: float = 0.0


@dataclass(frozen=True)
class SpeculationFigures:
    """Of speculative decoding: how often proposed tokens were verified, how many these were, how many of them were
    right, and requests for which none are proposed although it is on."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_requests_left_out: int = 0


@dataclass(frozen=True)
class Figures:
    """Counts since the start and gauges of now; metrics and the live page read them.

    ``pages`` maps page ids to the owning request or ``cached``, ``quarantined``, ``shared``; free pages are
    left out. ``steps`` are the latest: (start, seconds, phase, sequences, tokens), in seconds since the start.
    ``handoff_seconds``, by ``HANDOFF_BOUNDS_S``, and ``worker_restarts`` by phase are those of split pools.
    ``findings`` are the latest wrong tags: (where it was found, page, whose reference it was, who holds the page).
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
    speculation: SpeculationFigures = SpeculationFigures()
    finished: dict[str, int] = field(default_factory=dict)
    pages: dict[int, str] = field(default_factory=dict)
    steps: tuple[tuple[float, float, str, int, int], ...] = ()
    handoff_seconds: Durations = Durations()
    worker_restarts: dict[str, int] = field(default_factory=dict)
    findings: tuple[tuple[str, int, str, tuple[str, ...]], ...] = ()


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
