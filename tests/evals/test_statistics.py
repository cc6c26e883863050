"""Means, perplexity and fidelity against models whose logits are known, with other people's formulas."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import UsageError
from quantkit_evals.fidelity import fidelity
from quantkit_evals.perplexity import perplexity
from quantkit_evals.statistics import Mean, Quantile

VOCAB = 11


class TableModel:
    """Logits are a function of the current token and its position only."""

    def __init__(self, seed: int, scale: float = 2.0) -> None:
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale
        self.largest_batch = 0

    def __call__(self, input_ids, use_cache):
        assert use_cache is False
        self.largest_batch = max(self.largest_batch, len(input_ids))
        return SimpleNamespace(logits=self.table[input_ids].bfloat16())


@pytest.fixture
def blocks():
    return np.random.default_rng(0).integers(0, VOCAB, (7, 20))


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40))
def test_mean_and_standard_error(values):
    mean = Mean.of(values)
    assert mean.value == pytest.approx(np.mean(values), abs=1e-9)
    assert mean.stderr == pytest.approx(scipy.stats.sem(values), rel=1e-6, abs=1e-9)


def test_one_block_has_no_standard_error():
    assert math.isnan(Mean.of([1.0]).stderr)
    with pytest.raises(ValueError, match="no blocks"):
        Mean.of([])


def test_perplexity_is_exp_of_the_cross_entropy(blocks):
    model = TableModel(1)
    result = perplexity(model, blocks, batch_blocks=3)
    x = torch.from_numpy(blocks)
    logits = model.table.bfloat16().float()[x[:, :-1]]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
    assert result.value == pytest.approx(math.exp(expected), rel=1e-5)
    assert result.num_tokens == 7 * 19
    assert result.stderr == pytest.approx(result.value * scipy.stats.sem(result.block_nll))
    assert model.largest_batch == 3


def test_a_model_that_knows_nothing_has_the_vocabulary_as_perplexity(blocks):
    assert perplexity(TableModel(1, scale=0.0), blocks).value == pytest.approx(VOCAB, rel=1e-6)


def test_fidelity_against_scipy(blocks):
    reference, other = TableModel(1), TableModel(2)
    result = fidelity(reference, {"other": other}, blocks, batch_blocks=2)["other"]
    p = scipy.special.softmax(reference.table.bfloat16().float().numpy(), axis=1)[blocks[:, :-1]]
    q = scipy.special.softmax(other.table.bfloat16().float().numpy(), axis=1)[blocks[:, :-1]]
    truth = blocks[:, 1:]
    p_right, q_right = p.argmax(-1) == truth, q.argmax(-1) == truth
    assert result.kl.value == pytest.approx(scipy.stats.entropy(p, q, axis=-1).mean(), rel=1e-5)
    assert result.kl.stderr == pytest.approx(scipy.stats.sem(scipy.stats.entropy(p, q, axis=-1).mean(1)), rel=1e-4)
    assert result.agreement.value == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    assert result.lost.value == pytest.approx((p_right & ~q_right).mean())
    assert result.gained.value == pytest.approx((~p_right & q_right).mean())
    assert result.lost.value > 0
    assert result.gained.value > 0
    assert result.perplexity == perplexity(other, blocks)
    assert result.reference == perplexity(reference, blocks)
    assert result.nll_difference.value == pytest.approx(result.perplexity.nll.value - result.reference.nll.value)


def test_float32_copies_of_few_positions_change_nothing(blocks, monkeypatch):
    pair = TableModel(1), {"other": TableModel(2)}
    whole = fidelity(*pair, blocks)["other"]
    monkeypatch.setattr("quantkit_evals.perplexity.CHUNK_ELEMENTS", 3 * VOCAB)  # 7 pieces of a block
    pieces = fidelity(*pair, blocks)["other"]
    assert pieces == whole
    np.testing.assert_array_equal(pieces.token_kl, whole.token_kl)


def test_kl_of_tokens_and_their_quantiles(blocks):
    reference, other = TableModel(1), TableModel(2)
    result = fidelity(reference, {"other": other}, blocks, batch_blocks=2)["other"]
    p = scipy.special.softmax(reference.table.bfloat16().double().numpy(), axis=1)[blocks[:, :-1]]
    q = scipy.special.softmax(other.table.bfloat16().double().numpy(), axis=1)[blocks[:, :-1]]
    expected = scipy.stats.entropy(p, q, axis=-1)
    np.testing.assert_allclose(result.token_kl, expected, rtol=1e-4)
    for share in (0.5, 0.99):
        assert result.kl_quantile(share).value == pytest.approx(np.quantile(expected, share), rel=1e-4)


def test_standard_error_of_a_quantile_is_what_repetition_shows():
    random = np.random.default_rng(1)
    repeated = [np.quantile(random.exponential(size=(40, 50)), 0.5) for _ in range(300)]
    found = [Quantile.of(random.exponential(size=(40, 50)), 0.5).stderr for _ in range(20)]
    assert np.mean(found) == pytest.approx(np.std(repeated), rel=0.15)
    # blocks whose tokens are all alike are worth one token each
    alike = [Quantile.of(np.repeat(random.exponential(size=(40, 1)), 50, 1), 0.5).stderr for _ in range(20)]
    assert np.mean(alike) > 4 * np.mean(found)


def test_quantile_of_one_block_and_of_none():
    assert math.isnan(Quantile.of(np.ones((1, 5)), 0.5).stderr)
    with pytest.raises(ValueError, match="no blocks"):
        Quantile.of(np.ones((0, 5)), 0.5)


def test_a_model_equals_itself(blocks):
    result = fidelity(TableModel(1), {"same": TableModel(1)}, blocks)["same"]
    assert (result.kl.value, result.agreement.value, result.lost.value, result.gained.value) == (0, 1, 0, 0)
    assert result.nll_difference == Mean(0.0, 0.0)
    assert result.kl_quantile(0.99) == Quantile(0.0, 0.0)


def test_paired_difference_is_sharper_than_the_unpaired(blocks):
    slightly = TableModel(1)
    slightly.table = slightly.table + 0.05 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))
    result = fidelity(TableModel(1), {"slightly": slightly}, blocks)["slightly"]
    assert result.nll_difference.stderr < 0.2 * result.perplexity.nll.stderr


def test_bad_logits_and_shapes_are_refused(blocks):
    broken = TableModel(1)
    broken.table[3, 4] = math.nan
    with pytest.raises(UsageError, match="not finite"):
        perplexity(broken, blocks)
    with pytest.raises(UsageError, match="blocks of shape"):
        perplexity(TableModel(1), blocks[:0])
    smaller = TableModel(1)
    smaller.table = smaller.table[:, :-1]
    with pytest.raises(ValueError, match="smaller: vocabulary 10"):
        fidelity(TableModel(1), {"smaller": smaller}, blocks)
    with pytest.raises(ValueError, match="7 blocks against 6"):
        perplexity(TableModel(1), blocks).difference(perplexity(TableModel(1), blocks[:6]))
