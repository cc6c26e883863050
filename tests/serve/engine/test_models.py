"""The engine over tiny models: answers have the same bits alone and in a crowd, and are those of transformers.

The crowd shares prompts and is served in chunks, from a pool so small that requests are preempted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit_serve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from quantkit_serve.engine.engine import Engine
from quantkit_serve.engine.vocabulary import Vocabulary
from quantkit_serve.model.runner import open_runner
from quantkit_serve.request import Output, Request
from tests.serve.engine.fake import drain, request
from tests.serve.model.oracle import reference_logits, tokens, transformers_model
from tests.serve.model.tiny import CASES, checkpoint

PAGE_SIZE = 8
FLOAT32 = {"compute": "float32", "kv_dtype": "f32"}
BFLOAT16 = {"compute": "bfloat16", "kv_dtype": "fp8"}


def engine(path: Path, numbers: dict[str, str], *, pages: int, prefix: bool, chunk: int, seqs: int) -> Engine:
    model = ModelConfig("fp8", compute=numbers["compute"], deterministic=True)  # type: ignore[arg-type]
    cache = CacheConfig(numbers["kv_dtype"], PAGE_SIZE, has_prefix_cache=prefix)  # type: ignore[arg-type]
    page_bytes = open_runner(path, EngineConfig(model, cache)).facts.page_bytes
    settings = EngineConfig(
        model,
        CacheConfig(cache.kv_dtype, PAGE_SIZE, pages * page_bytes, has_prefix_cache=prefix),
        SchedulerConfig(seqs, chunk),
    )
    runner = open_runner(path, settings)
    return Engine(runner, settings, Vocabulary(tuple(f"<{i}>".encode() for i in range(runner.facts.vocab_size))))


def requests() -> list[Request]:
    stem = tokens(0, 17)
    prompts = [stem[: 9 + 2 * i] + tokens(i, 3) for i in range(4)] + [tokens(9, 5)]
    return [
        request(
            f"r{i}", prompt, 36, ignore_eos=True, logprobs=3, seed=i, temperature=0.0 if i % 2 else 0.8,
            prompt_logprobs=2 if i == 2 else None,
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


def content(outputs: list[Output]) -> list[object]:
    return [(o.token_ids, o.text, o.logprobs, o.prompt_logprobs, o.finish) for o in outputs]


def serve_alone(path: Path, numbers: dict[str, str]) -> dict[str, list[Output]]:
    core = engine(path, numbers, pages=40, prefix=False, chunk=512, seqs=1)
    answers = {}
    for one in requests():
        core.add(one)
        answers |= drain(core).all
    return answers


@pytest.mark.parametrize("numbers", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["qwen3_moe", "glm_moe_dsa"])
def test_answers_have_the_same_bits_alone_and_in_a_crowd(
    case: str, numbers: dict[str, str], tmp_path: Path
) -> None:
    path = checkpoint(tmp_path / "checkpoint", CASES[case])
    core = engine(path, numbers, pages=15, prefix=True, chunk=5, seqs=4)
    for one in requests():
        core.add(one)
    crowd = drain(core).all
    figures = core.figures()
    assert figures.preemptions > 0 and figures.cached_tokens > 0
    alone = serve_alone(path, numbers)
    for name, outputs in alone.items():
        assert content(crowd[name]) == content(outputs)


@pytest.mark.parametrize("case", ["qwen3_moe", "glm_moe_dsa"])
def test_greedy_answers_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoint", CASES[case])
    model = transformers_model(path, tmp_path / "copy")
    alone = serve_alone(path, FLOAT32)
    for one in requests():
        answer = [token for output in alone[one.request_id] for token in output.token_ids]
        expected = reference_logits(model, [*one.prompt, *answer]).double().log_softmax(-1)
        start = len(one.prompt) - 1
        for i, output in enumerate(alone[one.request_id]):
            (found,) = output.logprobs
            assert found.logprob == pytest.approx(float(expected[start + i, found.token_id]), abs=1e-3)
            if one.params.temperature == 0:
                assert found.token_id == int(expected[start + i].argmax())
        for i, found in enumerate(alone[one.request_id][0].prompt_logprobs or ()):
            if found is not None:
                assert found.logprob == pytest.approx(float(expected[i - 1, found.token_id]), abs=1e-3)
