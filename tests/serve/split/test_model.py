"""A real model in two workers: the bits of the single process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import quantkit
from quantkit_serve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from quantkit_serve.engine.engine import Engine
from quantkit_serve.engine.loop import EngineService
from quantkit_serve.engine.vocabulary import Vocabulary
from quantkit_serve.model.runner import open_runner
from quantkit_serve.phase import Phase
from quantkit_serve.request import Output, Request
from quantkit_serve.split.config import SplitConfig
from quantkit_serve.split.engine import SplitEngine
from quantkit_serve.split.pair import open_pair
from tests.serve.engine.fake import drain, request
from tests.serve.model.oracle import tokens
from tests.serve.model.tiny import CASES, checkpoint

NUM_PAGES = 18
PAGE_SIZE = 8


def requests() -> list[Request]:
    stem = tokens(0, 17)
    prompts = [stem[: 9 + 2 * i] + tokens(i, 3) for i in range(4)] + [tokens(9, 5)]
    return [
        request(f"r{i}", prompt, 24, ignore_eos=True, logprobs=2, seed=i, temperature=0.0 if i % 2 else 0.8)
        for i, prompt in enumerate(prompts)
    ]


def content(outputs: list[Output]) -> list[object]:
    return [(o.token_ids, o.text, o.logprobs, o.finish) for o in outputs]


async def collect(service: EngineService, one: Request) -> list[Output]:
    return [output async for output in service.submit(one)]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    source = checkpoint(folder / "checkpoint", CASES["glm_moe_dsa"])
    quantkit.convert(quantkit.plan(source, method="rtn"), folder / "artifact", jobs=1)
    return folder / "artifact"


def test_answers_have_the_bits_of_the_single_process(artifact: Path) -> None:
    """Both weight sets, the kernels, FP8 pages, a shared prefix, chunks, and a pool that is small for all."""
    model = ModelConfig("dual", deterministic=True)
    page_bytes = open_runner(artifact, EngineConfig(model, CacheConfig("fp8", PAGE_SIZE))).facts.page_bytes
    settings = EngineConfig(model, CacheConfig("fp8", PAGE_SIZE, NUM_PAGES * page_bytes), SchedulerConfig(4, 5))
    runner = open_runner(artifact, settings)
    words = Vocabulary(tuple(f"<{i}>".encode() for i in range(runner.facts.vocab_size)))
    single = Engine(runner, settings, words)
    for one in requests():
        single.add(one)
    expected = drain(single).all

    split = SplitConfig(dict.fromkeys(Phase, 1), has_canary=True)
    pair = open_pair(artifact, settings, split, "tiny")
    core = SplitEngine(pair, settings, split, words)
    assert pair.facts.kv_format_id == runner.facts.kv_format_id and pair.facts.name == "tiny"

    async def serve() -> list[list[Output]]:
        service = EngineService(core)
        await service.start()
        try:
            return list(await asyncio.gather(*(collect(service, one) for one in requests())))
        finally:
            await service.stop()

    found = asyncio.run(serve())
    for one, outputs in zip(requests(), found, strict=True):
        assert content(outputs) == content(expected[one.request_id])
    assert core.figures().cached_tokens > 0
