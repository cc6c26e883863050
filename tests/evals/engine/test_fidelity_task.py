"""Fidelity in lockstep through the engine against the same figures of transformers on dequantized copies."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.errors import ArtifactError, UsageError
from quantkit_evals.candidates.candidate import Progress
from quantkit_evals.candidates.engine import EngineCandidate
from quantkit_evals.candidates.fidelity_task import BY_CONTEXT, BY_POSITION, FidelityText, fidelity_task
from quantkit_evals.compare import compare
from quantkit_evals.configuration import Configuration
from quantkit_evals.fidelity import Fidelity, fidelity
from quantkit_evals.run import Run
from quantkit_evals.run_file import read_run, write_run
from quantkit_evals.text import token_blocks
from quantkit_serve.start.servable import Servable
from tests.serve.model.oracle import transformers_model

TEXT = FidelityText(num_blocks=3, block_tokens=40, contexts=(16, 64, 4096))


def engine(artifact: Path, weights: Any, compute: Any = "float32", path: Any = "decode") -> EngineCandidate:
    kv: Any = "f32" if compute == "float32" else "bf16"
    return EngineCandidate(Servable(artifact, "tiny-w4"), Configuration(weights, kv, path, compute))


@pytest.fixture(scope="module")
def expected(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Fidelity:
    scratch = tmp_path_factory.mktemp("float32")
    models = {view: transformers_model(artifact / view, scratch / view) for view in ("prefill", "decode")}
    blocks = token_blocks(artifact / "decode", num_blocks=3, block_tokens=40)
    return fidelity(models["prefill"], {"int4": models["decode"]}, blocks)["int4"]


@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_figures_are_those_of_transformers(artifact: Path, expected: Fidelity, path: str) -> None:
    heard: list[Progress] = []
    one, other = fidelity_task(
        engine(artifact, "fp8", path=path),
        [engine(artifact, "int4", path=path)],
        text=TEXT,
        on_progress=heard.append,
    )
    assert (one.task.path, other.task.path) == (path, path) and heard[-1].share == 1

    def means(figure: str, records: Any = other) -> list[float]:
        return [item.values[figure] / item.weights[figure] for item in records.items]

    assert means("kl") == pytest.approx(expected.block_kl, rel=1e-3)
    assert means("perplexity") == pytest.approx(expected.perplexity.block_nll, abs=1e-5)
    assert means("perplexity", one) == pytest.approx(expected.reference.block_nll, abs=1e-5)
    assert sum(means("top1_agreement")) / 3 == pytest.approx(expected.agreement.value)
    assert sum(means("lost")) / 3 == pytest.approx(expected.lost.value)
    assert sum(means("gained")) / 3 == pytest.approx(expected.gained.value)
    by_position = other.task.curves[BY_POSITION]
    assert [by_position[0].start, by_position[-1].stop] == [1, 40]
    kl = expected.token_kl[:, : by_position[0].stop - 1]
    assert by_position[0].value == pytest.approx(kl.mean(), rel=1e-3)
    assert by_position[0].stderr == pytest.approx(kl.mean(1).std(ddof=1) / math.sqrt(3), rel=1e-3)
    assert [(point.start, point.stop) for point in other.task.curves[BY_CONTEXT]] == [(16, 48), (64, 96)]
    assert [item.prompt_sha256 for item in one.items] == [item.prompt_sha256 for item in other.items]


def test_dual_differs_in_decode_only_and_records_can_be_kept(artifact: Path, tmp_path: Path) -> None:
    text = FidelityText(num_blocks=2, block_tokens=24, contexts=())
    fp8, dual = engine(artifact, "fp8", "bfloat16"), engine(artifact, "dual", "bfloat16")
    same = fidelity_task(fp8, [dual, fp8], text=text, path="prefill")
    assert all(item.values["kl"] == 0 for records in same[1:] for item in records.items)
    one, other = fidelity_task(fp8, [dual], text=text)
    assert other.task.path == "decode" and all(item.values["kl"] > 1e-4 for item in other.items)
    empty = Run(fp8.identity(), {}, (), ())
    first = one.added_to(empty)
    second = other.added_to(Run(dual.identity(), {"seed": 0}, (), ()), first)
    assert second.settings["baseline"] == first.candidate
    assert second.candidate["scored_tokens"] == {"fidelity": {"tokens": 46, "decoded": 44}}
    compared = {metric.metric.name: metric for metric in compare(first, second).metrics}
    assert compared["kl"].candidate.value > 1e-4 and compared["kl"].baseline is None
    ratio = compared["perplexity"].ratio
    assert ratio is not None and 0.9 < ratio < 1.1
    write_run(second, tmp_path / "run")
    assert read_run(tmp_path / "run") == second


def test_what_can_not_be_compared(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = engine(artifact, "fp8", "bfloat16")
    with pytest.raises(UsageError, match="nobody to compare"):
        fidelity_task(fp8, [])
    with pytest.raises(UsageError, match="1 blocks"):
        FidelityText(num_blocks=1)
    with pytest.raises(UsageError, match="a block does not fit: 4095 tokens, the model takes 2048"):
        fidelity_task(fp8, [fp8], text=FidelityText(num_blocks=2, block_tokens=4096, contexts=()))
    bare = engine(artifact, "dual", "bfloat16")
    bare.tokenizer_folder = tmp_path
    with pytest.raises(UsageError, match=r"no tokenizer\.json in this directory"):
        fidelity_task(fp8, [bare])
    short = engine(artifact, "dual", "bfloat16")
    short.runner.facts = replace(short.runner.facts, max_model_len=20)
    with pytest.raises(
        UsageError, match="dual, bf16 KV, task fidelity: a block does not fit: 23 tokens, the model"
    ):
        fidelity_task(fp8, [short], text=FidelityText(num_blocks=2, block_tokens=24, contexts=()))
    small = [engine(artifact, weights, "bfloat16") for weights in ("fp8", "dual")]
    for one in small:
        one.runner.facts = replace(one.runner.facts, vocab_size=64)
    with pytest.raises(UsageError, match=r"fidelity: a block has the token .* the model knows 64"):
        fidelity_task(small[0], small[1:], text=FidelityText(num_blocks=2, block_tokens=24, contexts=()))
    dual = engine(artifact, "dual", "bfloat16")
    run = dual.runner.run
    monkeypatch.setattr(dual.runner, "run", lambda batch: run(batch).clone().fill_(torch.nan))
    with pytest.raises(
        ArtifactError, match=r"dual, bf16 KV, task fidelity, item block [01]: the model's logits are not num"
    ):
        fidelity_task(fp8, [dual], text=FidelityText(num_blocks=2, block_tokens=24, contexts=()))
