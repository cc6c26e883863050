"""Steps of the scorer on a model that reads its context from the pages.

Whatever is shared, evicted, cut into chunks or batched, every row must be what the whole text before it gives.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import numpy as np
import pytest
import torch

from quantkit_evals.candidates.pair import NotFinite, Pair
from quantkit_evals.candidates.scorer import Scorer, ScorerLimits
from quantkit_serve.batch import Batch, ModelFacts
from quantkit_serve.phase import Phase

VOCAB, PAGE, LENGTH = 32, 4, 48


def distribution(tokens: tuple[int, ...]) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(repr(tokens).encode()).digest()[:4], "little")
    return torch.from_numpy(np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32))


class Reader:
    """A runner whose pages hold tokens."""

    def __init__(self, num_pages: int) -> None:
        self.pages = np.full((num_pages, PAGE), -1, np.int64)
        self.facts = ModelFacts("reader", VOCAB, LENGTH, 1, "", frozenset(), {})
        self.steps: list[tuple[Phase, int, int]] = []  # phase, sequences, tokens

    def allocate(self, num_pages: int) -> None: ...

    def run(self, batch: Batch) -> torch.Tensor:
        sizes = np.diff(batch.cu_tokens)
        self.steps.append((batch.phase, len(sizes), len(batch.token_ids)))
        assert batch.phase is Phase.PREFILL or (sizes == 1).all()
        rows = np.repeat(np.arange(len(sizes)), sizes)
        places = batch.block_table[rows, batch.positions // PAGE], batch.positions % PAGE
        assert len(set(zip(*(place.tolist() for place in places), strict=True))) == len(
            rows
        )  # nobody's page twice
        self.pages[places] = batch.token_ids
        found = []
        for at in batch.logit_rows:
            table = batch.block_table[rows[at]]
            context = self.pages[table].flatten()[: batch.positions[at] + 1]
            found.append(distribution(tuple(context.tolist())))
        return torch.stack(found) if found else torch.zeros(0, VOCAB)


def pairs_of(seed: int, count: int) -> list[Pair]:
    """Pairs with much in common: beginnings, whole contexts, everything but the last token, everything."""
    rng = np.random.default_rng(seed)
    stems = [tuple(rng.integers(0, VOCAB, rng.integers(1, 24)).tolist()) for _ in range(3)]
    found = []
    for _ in range(count):
        context = (*stems[rng.integers(3)], *rng.integers(0, 2, rng.integers(0, 9)).tolist())
        continuation = tuple(rng.integers(0, 3, rng.integers(1, 10)).tolist())
        found.append(Pair(context, continuation))
    return found


def expected(pair: Pair) -> tuple[float, bool]:
    total, is_greedy = 0.0, True
    for at, token in enumerate(pair.continuation):
        logits = distribution(pair.context + pair.continuation[:at])
        total += float(logits.double().log_softmax(-1)[token])
        is_greedy = is_greedy and int(logits.argmax()) == token
    return total, is_greedy


@pytest.mark.parametrize("path", ["prefill", "decode"])
@pytest.mark.parametrize("seed", range(6))
def test_every_row_sees_its_own_text(path: Literal["prefill", "decode"], seed: int) -> None:
    pairs = pairs_of(seed, 60)
    num_pages = [12, 13, 20, 200][seed % 4]  # 12 hold the longest alone
    limits = ScorerLimits(max_sequences=[1, 3, 8][seed % 3], max_tokens=[1, 7, 64][seed % 3])
    runner = Reader(num_pages)
    scorer = Scorer(runner, num_pages=num_pages, page_size=PAGE, limits=limits)
    found = dict(scorer.score(pairs, path, decoded_context=seed % 2))
    assert sorted(found) == list(range(len(pairs)))
    for index, pair in enumerate(pairs):
        logprob, is_greedy = expected(pair)
        assert found[index].logprob == pytest.approx(logprob, abs=1e-4) and found[index].is_greedy == is_greedy
        decoded = len(pair.continuation) - (1 if seed % 2 == 0 or len(pair.context) == 1 else 0)
        assert found[index].num_decoded == (decoded if path == "decode" else 0)
    assert all(count <= limits.max_sequences for _, count, _ in runner.steps)
    assert all(tokens <= limits.max_tokens for phase, _, tokens in runner.steps if phase is Phase.PREFILL)


def test_what_contexts_share_is_computed_once() -> None:
    context = tuple(range(1, 25))
    choices = [Pair(context, (n, 7, 8)) for n in range(4)]
    runner = Reader(64)
    scorer = Scorer(runner, num_pages=64, page_size=PAGE)
    dict(scorer.score(choices, "decode"))
    prefilled = sum(tokens for phase, _, tokens in runner.steps if phase is Phase.PREFILL)
    assert prefilled == 24 + 3 * 4  # the last page is of everybody's own
    assert [(count, tokens) for phase, count, tokens in runner.steps if phase is Phase.DECODE] == [(4, 4), (4, 4)]
    letters = Reader(64)
    found = dict(
        Scorer(letters, num_pages=64, page_size=PAGE).score([Pair(context, (n,)) for n in range(4)], "prefill")
    )
    assert sum(tokens for _, _, tokens in letters.steps) == 24 and len(found) == 4


def test_what_is_refused() -> None:
    runner = Reader(64)
    scorer = Scorer(runner, num_pages=4, page_size=PAGE)
    assert scorer.refusal(Pair((1,) * 10, (2,) * 7)) is None
    assert "the KV pages hold 16" in str(scorer.refusal(Pair((1,) * 10, (2,) * 8)))
    assert "the model takes 48" in str(scorer.refusal(Pair((1,) * 48, (2, 2))))
    for pair in (Pair((1,) * 10, (2,) * 8), Pair((), (1,)), Pair((1,), ())):
        with pytest.raises(ValueError, match=r"pages hold|needs a context"):
            list(scorer.steps([pair], "prefill"))
    run: Any = runner.run
    runner.run = lambda batch: run(batch) * torch.nan  # type: ignore[method-assign]
    with pytest.raises(NotFinite) as caught:
        list(scorer.score([Pair((1,), (2,)), Pair((3, 3), (4,))], "decode"))
    assert (caught.value.pair, caught.value.offset) == (1, 0)  # the longer one is first
