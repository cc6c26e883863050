"""Choice and weights of experts on every implementation, against plain loops in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit_kernels.forward.route import route

CASES: dict[str, dict[str, Any]] = {
    "qwen3": {"is_softmax": True},
    "qwen3, not normalized": {"is_softmax": True, "normalizes": False},
    "minimax": {"is_softmax": False},
    "glm": {"is_softmax": False, "epsilon": 1e-20, "scaling": 2.5, "correction": True},
    "deepseek": {
        "is_softmax": False, "epsilon": 1e-20, "scaling": 2.5, "correction": True,
        "num_groups": 4, "topk_groups": 2,
    },
}  # fmt: skip


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(row: list[float], k: int, correction: list[float] | None, o: dict[str, Any]) -> dict[int, float]:
    """Weight of each chosen expert."""
    if o["is_softmax"]:
        sum_of_all = sum(math.exp(x) for x in row)
        scores = [math.exp(x) / sum_of_all for x in row]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in row]
    choice = [s + c for s, c in zip(scores, correction or [0.0] * len(row), strict=True)]
    groups = o.get("num_groups", 1)
    size = len(row) // groups
    if groups > 1:
        good = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: good[g])[-o["topk_groups"] :]
        choice = [c if i // size in kept else -math.inf for i, c in enumerate(choice)]
    ids = sorted(range(len(row)), key=lambda i: choice[i])[-k:]
    total = sum(scores[i] for i in ids) if o.get("normalizes", True) else 1.0
    return {i: scores[i] / total * o.get("scaling", 1.0) for i in ids}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("experts, k", [(8, 2), (16, 4), (48, 8), (256, 8)])
def test_choice_and_weights(each_implementation: str, experts: int, k: int, name: str) -> None:
    options = CASES[name]
    correction = numbers(experts, experts) * 0.1 if options.get("correction") else None
    for tokens in (1, 5, 40):
        logits = numbers(tokens, tokens, experts + 3)[:, 3:] * 2
        ids, weights = route(logits, k, **options | {"correction": correction})
        assert ids.dtype is torch.int64 and weights.dtype is torch.float32
        for row in range(tokens):
            given = None if correction is None else correction.double().tolist()
            wanted = by_hand(logits[row].double().tolist(), k, given, options)
            assert set(ids[row].tolist()) == set(wanted)
            np.testing.assert_allclose(weights[row].numpy(), [wanted[i] for i in ids[row].tolist()], rtol=4e-6)
        alone = [route(row, k, **options | {"correction": correction}) for row in logits.split(1)]
        assert torch.equal(ids, torch.cat([one for one, _ in alone]))
        assert torch.equal(weights, torch.cat([one for _, one in alone]))


def test_extreme_numbers(each_implementation: str) -> None:
    logits = torch.tensor([[300.0, -300.0, 0.0, 1.0], [math.nan, 0.0, 2.0, 1.0], [math.nan] * 4])
    for is_softmax in (True, False):
        ids, weights = route(logits, 2, is_softmax=is_softmax)
        assert ids[0, 0] == 0 and weights[0].isfinite().all()
        assert weights[1:].isnan().any(1).all()  # the damage shows
        assert all(len(set(row)) == 2 and set(row) <= {0, 1, 2, 3} for row in ids.tolist())
    assert set(route(logits, 2, is_softmax=False)[0][1].tolist()) == {0, 2}


def test_ties_go_to_the_lower_expert(each_level: str) -> None:
    ids, _ = route(torch.zeros(1, 16), 4, is_softmax=False)
    assert ids.tolist() == [[0, 1, 2, 3]]


def test_nothing_in_nothing_out(each_implementation: str) -> None:
    ids, weights = route(torch.zeros(0, 8), 2, is_softmax=True)
    assert ids.shape == weights.shape == (0, 2)


@pytest.mark.parametrize(
    "changes, error, named",
    [
        ({"logits": torch.zeros(2, 8).bfloat16()}, TypeError, "logits must be float32"),
        ({"top_k": 0}, ValueError, "top_k must lie in"),
        ({"top_k": 9}, ValueError, "9 experts can't be chosen"),
        ({"num_groups": 3}, ValueError, "num_groups must divide 8"),
        ({"num_groups": 8}, ValueError, "groups of two or more"),
        ({"num_groups": 2, "topk_groups": 3}, ValueError, "can't be chosen"),
        ({"num_groups": 4, "topk_groups": 1, "top_k": 3}, ValueError, "3 experts can't be chosen"),
        ({"correction": torch.zeros(7)}, ValueError, "correction must be of shape"),
        ({"epsilon": math.inf}, ValueError, "epsilon must be a finite"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], error: type[Exception], named: str) -> None:
    given: dict[str, Any] = {"logits": torch.zeros(2, 8), "top_k": 2, "is_softmax": True} | changes
    with pytest.raises(error, match=named):
        route(**given)
