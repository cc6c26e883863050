"""Sampling against plain loops, transformers' processors, and the distribution that it must have."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quantkit_serve.engine.logprobs import logprobs
from quantkit_serve.engine.sampler import Draw, is_finite, sample, uniform
from quantkit_serve.request import SamplingParams

F32 = NDArray[np.float32]


def params(**given: object) -> SamplingParams:
    return SamplingParams(16, **given)  # type: ignore[arg-type]


def random_logits(seed: int, rows: int = 1, columns: int = 50) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32) * 3


def draw_many(logits: F32, wanted: SamplingParams, count: int = 6_000) -> NDArray[np.int64]:
    """How often each token is drawn at ``count`` positions."""
    tokens = sample(np.tile(logits, (count, 1)), [Draw(wanted, 7, position) for position in range(count)])
    return np.bincount(np.array(tokens), minlength=logits.shape[1])


def test_greedy_takes_the_lowest_id_of_the_largest() -> None:
    logits = np.zeros((2, 100), np.float32)
    logits[0, [40, 7, 99]] = 5
    assert sample(logits, [Draw(params(temperature=0), 0, 0)] * 2) == [7, 0]


@pytest.mark.parametrize("temperature", [1e-4, 1e-9, 1e-30, 1e-300, 5e-324])
def test_tiny_temperatures_are_greedy_and_overflow_nothing(temperature: float) -> None:
    logits = random_logits(1, 5) * 1000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = params(temperature=temperature, top_p=0.9, top_k=40, min_p=0.1)
        assert sample(logits, [Draw(wanted, 3, 1)] * 5) == logits.argmax(1).tolist()
        assert sample(logits, [Draw(params(temperature=temperature), 3, 1)] * 5) == logits.argmax(1).tolist()


def test_a_huge_temperature_is_uniform() -> None:
    counts = draw_many(random_logits(2, columns=10), params(temperature=1e300))
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 5},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.2, "min_p": 0.05},
        {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_the_distribution_is_that_of_transformers(given: dict[str, float]) -> None:
    logits = random_logits(3)
    scores = TemperatureLogitsWarper(given["temperature"])(None, torch.from_numpy(logits))
    if "top_k" in given:
        scores = TopKLogitsWarper(given["top_k"])(None, scores)
    if "top_p" in given:
        scores = TopPLogitsWarper(given["top_p"])(None, scores)
    if "min_p" in given:
        scores = MinPLogitsWarper(given["min_p"])(None, scores)
    expected = torch.softmax(scores.double(), -1)[0].numpy() * 6_000
    counts = draw_many(logits, params(**given))
    assert (counts[expected == 0] == 0).all()
    often = expected > 5
    rare = np.array([expected[~often].sum()]), np.array([counts[~often].sum()])
    have, want = np.append(counts[often], rare[1]), np.append(expected[often], rare[0])
    kept = want > 0
    assert stats.chisquare(have[kept], want[kept] * have[kept].sum() / want[kept].sum()).pvalue > 1e-4


def test_wide_distributions_are_drawn_right() -> None:
    """Several chunks of a row, and tokens of which each is rare and all together are not."""
    logits = np.random.default_rng(5).standard_normal((1, 300), np.float32) * 0.5
    weights = np.exp(logits[0].astype(np.float64))
    counts = draw_many(logits, params(), 10_000)
    assert stats.chisquare(counts, weights / weights.sum() * 10_000).pvalue > 1e-4
    logits = np.full((1, 5000), -7, np.float32)
    logits[0, 4000] = 0  # has 1 / (1 + 4999 exp(-7)) = 0.18 of all
    kept = np.flatnonzero(draw_many(logits, params(top_p=0.5), 2500))
    expected = (0.5 * (1 + 4999 * np.exp(-7)) - 1) / np.exp(-7)  # besides the likely one, the lowest ids
    assert kept[-1] == 4000 and expected - 60 < kept[-2] < expected + 1


def test_of_equally_likely_tokens_the_lowest_ids_are_kept() -> None:
    logits = np.zeros((1, 30), np.float32)
    logits[0, 20] = 1
    counts = draw_many(logits, params(top_k=4), 2000)
    assert np.flatnonzero(counts).tolist() == [0, 1, 2, 20]
    assert np.flatnonzero(draw_many(logits, params(top_k=1), 50)).tolist() == [20]
    counts = draw_many(logits, params(top_p=0.5), 2000)  # 14 besides 20: (e + 13) / (e + 29) < 0.5
    assert np.flatnonzero(counts).tolist() == [*range(14), 20]


def test_top_p_and_min_p_always_leave_a_token() -> None:
    logits = random_logits(4)
    for wanted in (params(top_p=1e-9), params(min_p=1.0)):
        assert np.flatnonzero(draw_many(logits, wanted, 50)).tolist() == [logits.argmax()]


ROWS = st.builds(
    dict,
    temperature=st.sampled_from([0.0, 1e-5, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 1000]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {3: 5.0}]),
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(ROWS, st.integers(-(1 << 63), (1 << 64) - 1), st.integers(0, 1 << 40)), min_size=1, max_size=9
    )
)
def test_a_draw_is_the_same_in_any_batch(rows) -> None:  # type: ignore[no-untyped-def]
    logits = random_logits(len(rows), len(rows))
    before = logits.copy()
    draws = [Draw(params(**given), seed, position, {1: 2}, (4, 5)) for given, seed, position in rows]
    together = sample(logits, draws)
    assert [sample(logits[i : i + 1], [draw])[0] for i, draw in enumerate(draws)] == together
    assert sample(logits[::-1], draws[::-1]) == together[::-1]
    assert (logits == before).all()


def test_wide_rows_are_drawn_in_blocks_and_stay_the_same() -> None:
    logits = random_logits(5, 3, 700_000)
    draws = [Draw(params(), 1, 0), Draw(params(top_p=0.5), 1, 1), Draw(params(), 2, 0)]
    assert sample(logits, draws) == [sample(logits[i : i + 1], [draw])[0] for i, draw in enumerate(draws)]


def test_random_numbers_depend_on_seed_and_position_and_never_change() -> None:
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(-1, 5)] == PINNED
    values = [uniform(seed, position) for seed in range(60) for position in range(60)]
    assert len(set(values)) == len(values)
    assert stats.kstest(values, "uniform").pvalue > 1e-3


PINNED = [0.0564663990004608, 0.6487508310490744, 0.44008326622012284, 0.9318107580365629]


def test_penalties_are_those_of_openai_and_transformers() -> None:
    logits = random_logits(6)
    counts, prompt = {3: 2, 8: 1}, (8, 9, 9)
    for penalties in (
        {"frequency_penalty": 0.7},
        {"presence_penalty": -1.5},
        {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 1.4},
        {"repetition_penalty": 0.5},
    ):
        wanted = params(temperature=0.0, **penalties)
        seen = torch.tensor([[*counts, *prompt]])
        expected = RepetitionPenaltyLogitsProcessor(wanted.repetition_penalty)(
            seen, torch.from_numpy(logits.copy())
        )
        for token, times in counts.items():
            expected[0, token] -= times * wanted.frequency_penalty + wanted.presence_penalty
        # every token in turn is best if its bias lifts it just above what the others must have
        best = int(expected[0].argmax())
        for token in (3, 8, 9, 20):
            gap = float(expected[0, best] - expected[0, token])
            for margin in (-1e-3, 1e-3):
                bias = {token: gap + margin} if token != best else {}
                found = sample(
                    logits, [Draw(params(temperature=0.0, **penalties, logit_bias=bias), 0, 0, counts, prompt)]
                )
                assert found == [token if margin > 0 else best]


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-30])
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1.0])
def test_a_tiny_repetition_penalty_makes_no_infinity(penalty: float, temperature: float) -> None:
    logits = np.array([[1.0, 3.0, 2.0, 0.0, -1.0]], np.float32)
    params = SamplingParams(1, temperature=temperature, repetition_penalty=penalty, logit_bias={2: 100.0})
    for seed in range(20):
        assert sample(logits, [Draw(params, seed, 0, prompt=(2, 3, 4))]) == [2]


def test_forbidden_and_allowed_tokens() -> None:
    logits = random_logits(7)
    order = np.argsort(-logits[0]).tolist()
    greedy = params(temperature=0.0)
    assert sample(logits, [Draw(greedy, 0, 0, forbidden=order[:2])]) == [order[2]]
    allowed = np.zeros(50, np.bool_)
    allowed[order[5:9]] = True
    assert sample(logits, [Draw(greedy, 0, 0, allowed=allowed)]) == [order[5]]
    drawn = {sample(logits, [Draw(params(top_k=20, top_p=0.9), 1, p, allowed=allowed)])[0] for p in range(200)}
    assert drawn <= set(order[5:9])
    assert sample(logits, [Draw(params(), 0, 0, allowed=np.zeros(50, np.bool_))]) == [None]


def test_what_is_not_a_number_is_found() -> None:
    logits = random_logits(8, 4)
    logits[1, 3], logits[2, 4], logits[3, 5] = np.nan, np.inf, -np.inf
    assert is_finite(logits).tolist() == [True, False, False, False]


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = random_logits(9, 4)
    tokens, tops = [3, 4, int(logits[2].argmax()), 5], [0, 3, 1, 50]
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    for i, found in enumerate(logprobs(logits, tokens, tops)):
        order = sorted(range(50), key=lambda t: (-expected[i, t], t))
        assert (found.token_id, found.rank) == (tokens[i], order.index(tokens[i]) + 1)
        assert found.logprob == pytest.approx(expected[i, tokens[i]], abs=1e-6)
        assert [t for t, _ in found.top] == order[: tops[i]]
        assert [v for _, v in found.top] == pytest.approx([expected[i, t] for t in order[: tops[i]]], abs=1e-6)


def test_logprobs_list_equals_by_their_ids() -> None:
    logits = np.zeros((1, 9), np.float32)
    logits[0, 6] = 1
    (found,) = logprobs(logits, [8], [4])
    assert [t for t, _ in found.top] == [6, 0, 1, 2] and found.rank == 2
