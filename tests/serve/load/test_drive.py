"""Who is sent when; prompts differ."""

from __future__ import annotations

import asyncio
import random
from itertools import islice

import numpy as np
import pytest
from scipy import stats

from quantkit.errors import UsageError
from quantkit_serve.load.client import Prompt
from quantkit_serve.load.drive import Level, arrivals, drive
from quantkit_serve.load.prompts import random_tokens, windows
from quantkit_serve.load.record import Record


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_no_more_than_asked_at_a_time_and_every_prompt_once(concurrency: int) -> None:
    now, most = 0, 0
    sent: list[Prompt] = []

    async def send(prompt: Prompt) -> Record:
        nonlocal now, most
        now += 1
        most = max(most, now)
        sent.append(prompt)
        await asyncio.sleep(0)
        now -= 1
        return Record(0.0, 1.0)

    prompts = [(n,) for n in range(20)]
    records, seconds = asyncio.run(drive(send, prompts, Level(concurrency), random.Random(0)))
    assert sent == prompts and len(records) == 20 and seconds > 0
    assert most == min(concurrency, 20)


def test_a_rate_does_not_wait_for_answers() -> None:
    async def run() -> tuple[list[Record], float]:
        everybody = asyncio.Event()
        sent = 0

        async def send(prompt: Prompt) -> Record:
            nonlocal sent
            sent += 1
            if sent == 30:
                everybody.set()
            await asyncio.wait_for(everybody.wait(), 30)  # nobody is answered before all have been sent
            return Record(0.0, 1.0)

        return await drive(send, [(n,) for n in range(30)], Level(rate=2000.0), random.Random(0))

    records, seconds = asyncio.run(run())
    assert len(records) == 30
    assert seconds >= arrivals(2000.0, 30, random.Random(0))[-1]


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(4.0, 4001, random.Random(1))
    gaps = np.diff(times)
    assert times[0] == 0.0 and stats.kstest(gaps, stats.expon(scale=0.25).cdf).pvalue > 0.01
    assert times == arrivals(4.0, 4001, random.Random(1)) != arrivals(4.0, 4001, random.Random(2))


def test_windows_are_of_the_text_and_start_differently() -> None:
    text = random.Random(0).choices(range(5), k=3000)
    found = list(islice(windows(text, 40, random.Random(0)), 500))
    assert {len(w) for w in found} == {40} and len({w[:16] for w in found}) == 500
    joined = "".join(map(str, text))
    assert all("".join(map(str, w)) in joined for w in found)
    assert found == list(islice(windows(text, 40, random.Random(0)), 500))
    assert list(windows([1] * 50, 40, random.Random(0))) == [(1,) * 40]
    with pytest.raises(UsageError, match="has 3 tokens"):
        next(windows([1, 2, 3], 4, random.Random(0)))


def test_random_tokens() -> None:
    first, second = islice(random_tokens(7, 50, random.Random(0)), 2)
    assert first != second and set(first) == set(range(7)) and len(first) == 50
