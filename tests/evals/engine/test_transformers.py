"""A model of transformers as a candidate: lm-eval's own ``hf`` model, through our cache and records."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.errors import ArtifactError, UsageError
from quantkit_evals.candidates.engine import EngineCandidate
from quantkit_evals.candidates.transformers_model import TransformersCandidate
from quantkit_evals.configuration import Configuration
from quantkit_evals.harness.run_tasks import run_tasks
from quantkit_serve.start.servable import Servable
from tests.evals.engine.small_tasks import cloze
from tests.evals.engine.test_endpoint import TASKS


def test_an_artifacts_view_and_our_engine_agree(artifact: Path, tmp_path: Path) -> None:
    model = Servable(artifact, "tiny-w4")
    candidate = TransformersCandidate(model, dtype="float32")
    found = run_tasks(candidate, TASKS, cache=tmp_path)
    ours = run_tasks(EngineCandidate(model, Configuration("fp8", "f32", "prefill", "float32")), TASKS)
    for one, other in zip(found.items, ours.items, strict=True):
        assert one.values == pytest.approx(
            dict(other.values), rel=0.02, abs=0.1
        )  # its weights are rounded to BF16
        assert one.prompt_sha256 == other.prompt_sha256
    assert [task.path for task in found.tasks] == ["prefill", "prefill", "prefill", "generate"]
    assert found.candidate["view"] == "prefill" and found.candidate["pair_id"] == ours.candidate["pair_id"]
    again = TransformersCandidate(model, dtype="float32")
    assert run_tasks(again, TASKS, cache=tmp_path) == found


def test_weights_that_are_not_numbers(artifact: Path) -> None:
    candidate = TransformersCandidate(Servable(artifact, "tiny-w4"))
    candidate._lm.model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(
        ArtifactError, match="transformers, bfloat16, task choice, item 1: the model's logits are not"
    ):
        run_tasks(candidate, TASKS[:1])


def test_a_tokenizer_of_another_model_names_the_item(artifact: Path) -> None:
    candidate = TransformersCandidate(Servable(artifact, "tiny-w4"))
    candidate.tokenizer.add_tokens("<far>")
    with pytest.raises(UsageError, match="task cloze, item far: has the token 4096, the model knows 4096"):
        run_tasks(candidate, [cloze({"id": "far", "text": "A <far>", "target": " is"})])
