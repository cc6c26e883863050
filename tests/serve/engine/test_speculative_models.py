"""Speculation over real models: the same tokens with the same bits of their logprobs, alone, in crowds, preempted.

The tiny models have random weights, so that nearly all proposals are wrong; the bundled model is trained, and most
are right.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quantkit.data import bundled_model
from quantkit_serve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from quantkit_serve.engine.engine import Engine
from quantkit_serve.engine.vocabulary import Vocabulary
from quantkit_serve.http.tokenizer import Tokenizer
from quantkit_serve.model.runner import open_runner
from quantkit_serve.request import Output, Request
from tests.serve.engine.fake import drain, request
from tests.serve.model.oracle import tokens
from tests.serve.model.tiny import CASES, checkpoint

PAGE_SIZE = 8
FLOAT32 = {"compute": "float32", "kv_dtype": "f32"}
BFLOAT16 = {"compute": "bfloat16", "kv_dtype": "fp8"}


def engine(path: Path, numbers: dict[str, Any], num_tokens: int, *, pages: int = 80, **more: Any) -> Engine:
    """``num_tokens`` 0: without."""
    model = ModelConfig("fp8", compute=numbers["compute"], deterministic=more.get("deterministic", True))
    if num_tokens:
        model = replace(model, speculative="mtp", num_speculative_tokens=num_tokens)
    kv = CacheConfig(numbers["kv_dtype"], PAGE_SIZE)
    runner = open_runner(path, EngineConfig(model, kv))
    kv = replace(kv, kv_bytes=pages * runner.facts.page_bytes)
    settings = EngineConfig(model, kv, SchedulerConfig(8, 24))
    return Engine(runner, settings, Vocabulary(tuple(f"<{i}>".encode() for i in range(runner.facts.vocab_size))))


def content(outputs: list[Output]) -> tuple[list[int], list[object]]:
    return [t for o in outputs for t in o.token_ids], [p for o in outputs for p in o.logprobs]


def served(core: Engine, requests: list[Request], *, is_crowd: bool) -> dict[str, tuple[list[int], list[object]]]:
    found: dict[str, list[Output]] = {}
    for together in [requests] if is_crowd else [[one] for one in requests]:
        for one in together:
            core.add(one)
        found |= drain(core).all
    return {name: content(outputs) for name, outputs in found.items()}


def random_requests() -> list[Request]:
    stem = tokens(0, 13)
    prompts = [stem[: 9 + 2 * i] + tokens(i, 3) for i in range(3)] + [tokens(9, 5)]
    return [request(f"r{i}", prompt, 26, ignore_eos=True, logprobs=2) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("case", "numbers", "deterministic"),
    [  # of the kernels ``deterministic`` changes nothing but the pace of a replay; torch's products need it
        ("glm_moe_dsa", FLOAT32, True),
        ("glm_moe_dsa", BFLOAT16, False),
        ("deepseek_v3", BFLOAT16, True),
        ("glm4_moe, groups, no norms", BFLOAT16, False),
    ],
)
def test_tiny_models(case: str, numbers: dict[str, str], deterministic: bool, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoint", CASES[case])
    expected = served(engine(path, numbers, 0), random_requests(), is_crowd=False)
    for num_tokens, pages in ((1, 12), (3, 80)):
        core = engine(path, numbers, num_tokens, pages=pages, deterministic=deterministic)
        assert served(core, random_requests(), is_crowd=True) == expected
        assert core.figures().speculation.num_draft_tokens > 0
        assert pages > 12 or core.figures().preemptions > 0


@cache
def story_requests() -> tuple[Request, ...]:
    """With texts that the bundled model was trained to continue."""
    tokenizer = Tokenizer.load(bundled_model("tiny-glm"))
    texts = ("Once upon a time", "One day, a girl named Lily went", "Tom had a red ball")
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    return tuple(request(f"r{i}", p, 32, ignore_eos=True, logprobs=1) for i, p in enumerate(prompts))


def test_most_proposals_of_a_trained_model_are_right() -> None:
    path, requests = bundled_model("tiny-glm"), list(story_requests())
    expected = served(engine(path, BFLOAT16, 0), requests, is_crowd=True)
    for num_tokens in (1, 2):
        core = engine(path, BFLOAT16, num_tokens)
        assert served(core, requests, is_crowd=False) == expected
        drafts, steps = core.figures().speculation, core.figures().decode_steps
        assert drafts.num_accepted_tokens > 0.5 * drafts.num_draft_tokens
        assert steps + drafts.num_accepted_tokens == 31 * len(requests)
