"""Many requests at once: so many at a time, or at random times with a given rate.

``rate`` is an open loop: requests leave when their time comes, however many are under way, as independent users
would send them; gaps are exponential (a Poisson process).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from .client import Prompt
from .record import Record

Send = Callable[[Prompt], Awaitable[Record]]
Finished = Callable[[Record], None]


@dataclass(frozen=True)
class Level:
    """One point of a sweep: ``concurrency`` requests at a time, or ``rate`` of them per second; one is None."""

    concurrency: int | None = None
    rate: float | None = None


async def drive(
    send: Send,
    prompts: Sequence[Prompt],
    level: Level,
    rng: random.Random,
    finished: Finished = lambda record: None,
) -> tuple[list[Record], float]:
    """Send every prompt; the records in the order of their ends, and the seconds from start to last end."""
    records: list[Record] = []

    async def one(prompt: Prompt) -> None:
        record = await send(prompt)
        records.append(record)
        finished(record)

    queue = iter(prompts)

    async def worker() -> None:
        for prompt in queue:  # shared: each takes the next
            await one(prompt)

    async def later(prompt: Prompt, due: float) -> None:
        await asyncio.sleep(due - time.perf_counter())
        await one(prompt)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        if level.rate is None:
            for _ in range(level.concurrency or 1):
                group.create_task(worker())
        else:
            for prompt, gap in zip(prompts, arrivals(level.rate, len(prompts), rng), strict=True):
                group.create_task(later(prompt, start + gap))
    return records, time.perf_counter() - start


def arrivals(rate: float, count: int, rng: random.Random) -> list[float]:
    """Seconds after the start at which requests leave; the first one leaves at once."""
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:count]


def peak_in_flight(records: Sequence[Record]) -> int:
    """The most requests that were under way at one time."""
    changes = sorted([(r.start_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
