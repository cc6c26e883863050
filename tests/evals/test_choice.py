"""From names to candidates: a plain checkpoint has one weight set, which depends on what it stores."""

from __future__ import annotations

from pathlib import Path

import pytest

import quantkit
from quantkit.errors import UsageError
from quantkit_evals.candidates.engine import EngineCandidate
from quantkit_evals.choice import Choice, choose
from quantkit_evals.session import Settings, evaluate
from quantkit_serve.start.servable import Servable
from tests.evals.engine.small_tasks import cloze

TASK = cloze(*({"id": n, "text": f"Number {n} and", "target": f" is {n}"} for n in range(3)))

DEFAULT = Choice()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("choice") / "tiny-w4"
    quantkit.convert(quantkit.plan("tiny-glm", method="rtn"), target).close()
    return target


def chosen(model: Path, choice: Choice = DEFAULT) -> list[EngineCandidate]:
    baseline, candidates = choose(Servable(model, model.name), choice)
    found = [baseline, *candidates]
    assert all(isinstance(one, EngineCandidate) for one in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(("view", "weights"), [("prefill", "fp8"), ("decode", "int4")])
def test_a_plain_checkpoint_is_evaluated_as_what_it_stores(artifact: Path, view: str, weights: str) -> None:
    baseline, candidate = chosen(artifact / view)
    assert [one.configuration.weights for one in (baseline, candidate)] == [weights, weights]
    assert [one.configuration.kv_dtype for one in (baseline, candidate)] == ["bf16", "fp8"]
    (judged,) = evaluate(baseline, [candidate], Settings((TASK,))).judged
    assert judged.comparison.metrics[0].num_items == 3
    other = {"fp8": "int4", "int4": "fp8"}[weights]
    with pytest.raises(UsageError, match=f"a plain checkpoint has no {other} weights; accepted: {weights}"):
        chosen(artifact / view, Choice((other,)))  # type: ignore[arg-type]
    assert len(chosen(artifact / view, Choice((weights,)))) == 2  # type: ignore[arg-type]


def test_a_native_int4_checkpoint_can_be_the_baseline(artifact: Path) -> None:
    baseline, candidate = chosen(artifact, Choice(("dual",), baseline=artifact / "decode"))
    assert (baseline.configuration.weights, candidate.configuration.weights) == ("int4", "dual")
    assert evaluate(baseline, [candidate], Settings((TASK,))).judged
