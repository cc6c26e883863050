"""Figures against numpy and plain loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit_serve.load.drive import Level, peak_in_flight
from quantkit_serve.load.record import Record
from quantkit_serve.load.result import LevelResult, Summary, percentile


def records(count: int, seed: int = 0) -> list[Record]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        start = float(rng.uniform(0, 10))
        chunks = start + np.cumsum(rng.exponential(0.05, int(rng.integers(1, 30))))
        error = "HTTP 429: full" if rng.random() < 0.2 else None
        made.append(Record(
            start, float(chunks[-1]) + 0.01, tuple(chunks.tolist()), int(rng.integers(1, 500)), len(chunks), error
        ))  # fmt: skip
    return made


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=50))
def test_summaries_are_numpys(values: list[float]) -> None:
    found = Summary.of(values)
    ms = 1000 * np.array(values)
    assert found is not None
    assert (found.mean, found.median) == pytest.approx((ms.mean(), np.median(ms)), rel=1e-9)
    assert (found.p95, found.p99) == pytest.approx(tuple(np.percentile(ms, [95, 99])), rel=1e-9)


def test_a_level_by_plain_loops() -> None:
    made = records(200)
    found = LevelResult.of(Level(8), made, 12.5, output_len=20, price_per_hour=4.5)
    good = [r for r in made if r.error is None]
    assert (found.answered, found.failed) == (len(good), 200 - len(good)) and found.failed > 0
    assert found.failures == {"HTTP 429: full": found.failed}
    assert found.short == sum(r.output_tokens < 20 for r in good)
    output, prompt = sum(r.output_tokens for r in good), sum(r.prompt_tokens for r in good)
    assert found.request_throughput == pytest.approx(len(good) / 12.5)
    assert found.output_throughput == pytest.approx(output / 12.5)
    assert found.total_throughput == pytest.approx((output + prompt) / 12.5)
    itl, tpot, ttft, e2e = [], [], [], []
    for r in good:
        times = list(r.chunks_s)
        ttft.append(times[0] - r.start_s)
        e2e.append(times[-1] - r.start_s)
        itl += [b - a for a, b in itertools.pairwise(times)]
        if r.output_tokens > 1:
            tpot.append((times[-1] - times[0]) / (r.output_tokens - 1))
    for summary, values in (
        (found.itl_ms, itl),
        (found.tpot_ms, tpot),
        (found.ttft_ms, ttft),
        (found.e2e_ms, e2e),
    ):
        assert summary is not None
        assert summary.mean == pytest.approx(1e3 * np.mean(values))
        assert summary.p99 == pytest.approx(1e3 * np.percentile(values, 99))
    # 4.5 an hour buys 3600 s; a million tokens take 1e6 / throughput seconds
    assert found.cost_per_million_output == pytest.approx(4.5 * 1e6 / found.output_throughput / 3600)
    assert found.cost_per_million_total == pytest.approx(4.5 * 1e6 / found.total_throughput / 3600)


def test_nothing_answered_gives_no_figures() -> None:
    failed = [Record(0.0, 1.0, error="a"), Record(0.0, 1.0, error="b"), Record(0.0, 1.0, error="b")]
    found = LevelResult.of(Level(rate=2.0), failed, 1.0, output_len=4, price_per_hour=1.0)
    assert found.ttft_ms is found.tpot_ms is found.itl_ms is found.e2e_ms is None
    assert found.output_throughput == 0 and found.cost_per_million_output is None
    assert list(found.failures.items()) == [("b", 2), ("a", 1)]


def test_one_token_has_no_time_per_output_token() -> None:
    found = LevelResult.of(Level(1), [Record(0.0, 2.0, (1.0,), 5, 1)], 2.0, output_len=1, price_per_hour=None)
    assert found.tpot_ms is None and found.itl_ms is None and found.cost_per_million_total is None
    assert found.ttft_ms == found.e2e_ms == Summary(1000.0, 1000.0, 1000.0, 1000.0)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=12))
def test_peak_in_flight_by_counting_at_every_time(spans: list[tuple[int, int]]) -> None:
    made = [Record(float(start), float(start + length)) for start, length in spans]
    most = max((sum(s <= t < s + n for s, n in spans) for t in range(40)), default=0)
    assert peak_in_flight(made) == most
