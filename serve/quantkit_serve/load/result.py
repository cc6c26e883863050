"""The figures of a run, as they are printed, written and plotted.

Failed requests count in nothing but ``failures``: their tokens would make throughput look better than what users
got. Costs are of the whole machine at its price per hour, busy as it was in that level.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .drive import Level, peak_in_flight
from .record import Record

_MS = 1e3


@dataclass(frozen=True)
class Summary:
    """Of values in milliseconds."""

    mean: float
    median: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Summary | None:
        """None if there is nothing to summarize."""
        if not seconds:
            return None
        values = sorted(_MS * value for value in seconds)
        return cls(math.fsum(values) / len(values), *(percentile(values, p) for p in (50, 95, 99)))


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Linear between the two nearest values, as numpy's default."""
    place = (len(ascending) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (place - below)


@dataclass(frozen=True)
class LevelResult:
    """One level.

    Attributes:
        concurrency, rate: what was asked; see ``Level``.
        answered, failed: requests.
        failures: why, and how often.
        short: answers with fewer tokens than asked for.
        duration_s: from the first start to the last end.
        peak_in_flight: most requests at one time.
        prompt_tokens, output_tokens: of answered requests, as the server counted.
        request_throughput, output_throughput, total_throughput: requests, output tokens, and prompt and output
            tokens per second.
        ttft_ms, tpot_ms, itl_ms, e2e_ms: see ``record``; None without a value.
        cost_per_million_output, cost_per_million_total: tokens, in the currency of the price; None without a price
            or without tokens.
    """

    concurrency: int | None
    rate: float | None
    answered: int
    failed: int
    failures: dict[str, int]
    short: int
    duration_s: float
    peak_in_flight: int
    prompt_tokens: int
    output_tokens: int
    request_throughput: float
    output_throughput: float
    total_throughput: float
    ttft_ms: Summary | None
    tpot_ms: Summary | None
    itl_ms: Summary | None
    e2e_ms: Summary | None
    cost_per_million_output: float | None
    cost_per_million_total: float | None

    @classmethod
    def of(
        cls,
        level: Level,
        records: Sequence[Record],
        duration_s: float,
        *,
        output_len: int,
        price_per_hour: float | None,
    ) -> LevelResult:
        good = [r for r in records if r.error is None]
        prompt, output = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
        failures = Counter(r.error for r in records if r.error is not None)
        return cls(
            concurrency=level.concurrency,
            rate=level.rate,
            answered=len(good),
            failed=len(records) - len(good),
            failures=dict(failures.most_common()),
            short=sum(r.output_tokens < output_len for r in good),
            duration_s=duration_s,
            peak_in_flight=peak_in_flight(records),
            prompt_tokens=prompt,
            output_tokens=output,
            request_throughput=len(good) / duration_s,
            output_throughput=output / duration_s,
            total_throughput=(prompt + output) / duration_s,
            ttft_ms=Summary.of([r.ttft_s for r in good]),
            tpot_ms=Summary.of([t for r in good if (t := r.tpot_s) is not None]),
            itl_ms=Summary.of([gap for r in good for gap in r.itl_s]),
            e2e_ms=Summary.of([r.e2e_s for r in good]),
            cost_per_million_output=cost_per_million(output, duration_s, price_per_hour),
            cost_per_million_total=cost_per_million(prompt + output, duration_s, price_per_hour),
        )

    @property
    def label(self) -> str:
        return f"{self.concurrency}" if self.rate is None else f"{self.rate:g}/s"


def cost_per_million(tokens: int, seconds: float, price_per_hour: float | None) -> float | None:
    """What a million tokens cost if ``tokens`` take ``seconds``."""
    return None if price_per_hour is None or not tokens else price_per_hour * seconds / 3600 / tokens * 1e6


@dataclass(frozen=True)
class LoadResult:
    """A sweep: what was asked, and one result per level."""

    url: str
    model: str
    prompts: str
    input_len: int
    output_len: int
    num_prompts: int
    seed: int
    ignores_eos: bool
    price_per_hour: float | None
    levels: tuple[LevelResult, ...]

    @property
    def failed(self) -> int:
        return sum(level.failed for level in self.levels)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
