"""Our engine through the adapter against lm-eval's own ``hf`` model on a dequantized copy, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.data import bundled_text
from quantkit_evals.candidates.engine import EngineCandidate
from quantkit_evals.configuration import Configuration
from quantkit_evals.harness.lm_eval_model import HarnessModel
from quantkit_evals.tokenizer import load_tokenizer
from quantkit_serve.start.servable import Servable
from tests.serve.model.oracle import transformers_model

WORDS = bundled_text("heldout").read_text(encoding="utf-8").split("\n\n")


@pytest.fixture(scope="module")
def hf(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from lm_eval.models.huggingface import HFLM

    model = transformers_model(artifact / "prefill", tmp_path_factory.mktemp("float32"))
    return HFLM(pretrained=model, tokenizer=load_tokenizer(artifact / "prefill"), batch_size=4)


def ours(artifact: Path, path: Any, **settings: Any) -> HarnessModel:
    configuration = Configuration("fp8", "f32", path, "float32")
    return HarnessModel(EngineCandidate(Servable(artifact, "tiny-w4"), configuration, **settings))


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, 0, ("a task", index, 1)) for index, args in enumerate(arguments)]


PASSAGE = WORDS[3][:600]
PAIRS = (
    (PASSAGE[:300], PASSAGE[300:340]),
    (PASSAGE[:300], PASSAGE[300:318]),
    (PASSAGE[:300], " another sentence altogether."),
    (PASSAGE[:200] + "  ", "spaces before the word"),
    (PASSAGE[:40], PASSAGE[40:]),
    ("", "Nothing before it."),
    ("The", " man"),
    ("The", " woman"),
    ("<|endoftext|>The", " man"),
)


@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_loglikelihoods_are_those_of_hf(artifact: Path, hf: Any, path: str) -> None:
    model = ours(artifact, path)
    expected = hf.loglikelihood(requests("loglikelihood", *PAIRS), disable_tqdm=True)
    found = model.loglikelihood(requests("loglikelihood", *PAIRS))
    assert [f for f, _ in found] == pytest.approx([e for e, _ in expected], abs=1e-4, rel=2e-6)
    assert [g for _, g in found] == [g for _, g in expected]
    scored, decoded = model.scored_tokens["a task"]
    assert (decoded > 0.5 * scored) == (path == "decode") and (path == "decode" or decoded == 0)
    assert not model.answers.skipped


@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_long_texts_are_those_of_hf(artifact: Path, hf: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are made with less context than the model has, so that a short text has several."""
    model = ours(artifact, path)
    monkeypatch.setattr(type(hf), "max_length", 40)
    monkeypatch.setattr(HarnessModel, "max_length", 40)
    texts = requests("loglikelihood_rolling", (PASSAGE[:400],), (PASSAGE[:60],), ("A",))
    expected = hf.loglikelihood_rolling(texts, disable_tqdm=True)
    assert model.loglikelihood_rolling(texts) == pytest.approx(expected, abs=2e-4)


def test_answers_are_those_of_hf(artifact: Path, hf: Any) -> None:
    settings = {"until": ["\n\n", "."], "max_gen_toks": 12}
    prompts = requests("generate_until", *[(PASSAGE[: 50 * n], dict(settings)) for n in (1, 2, 5)])
    expected = hf.generate_until(prompts, disable_tqdm=True)
    model = ours(artifact, "decode")
    assert model.generate_until(prompts) == expected
    assert len(set(expected)) > 1
    model.loglikelihood(requests("loglikelihood", PAIRS[0]))  # the pages are scoring's again
    assert model.generate_until(prompts) == expected
