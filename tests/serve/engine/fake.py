"""A runner whose answers depend on everything that an engine can get wrong, and the same answers without an
engine.

What a token leaves in its page is a hash of its id, position, phase and of the whole history as found in pages;
the next token's logits follow from it. So a wrong page, position, phase, or a token computed twice changes every
token after it. ``alone`` computes the answer by a plain loop over a list, without pages, batches or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit_serve.batch import Batch, ModelFacts
from quantkit_serve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from quantkit_serve.engine.engine import Engine
from quantkit_serve.engine.vocabulary import Vocabulary
from quantkit_serve.phase import Phase
from quantkit_serve.request import Output, Request, SamplingParams
from tests.serve.engine.hashes import EOS, MASK, PAGE_BYTES, VOCAB, compute, logits_of, mix, stored

WORDS = Vocabulary(tuple(f"<{i}>".encode() if i != EOS else b"" for i in range(VOCAB)))


class FakeRunner:
    """Pages in a plain array; ``before`` is called in the middle of each step, with its batch.

    Attributes:
        batches: of all steps.
        broken: positions of which kind of sequences (first token) give NaN.
    """

    def __init__(
        self, *, page_size: int, max_model_len: int = 1 << 20, eos: int = EOS, vocab: int = VOCAB
    ) -> None:
        self.page_size = page_size
        self.facts = ModelFacts(
            "fake", vocab, max_model_len, PAGE_BYTES, "fake", frozenset({eos}), {"shared": 1, "prefill": 1}
        )
        self.before: Callable[[Batch], None] = lambda batch: None
        self.batches: list[Batch] = []
        self.broken: set[int] = set()

    def allocate(self, num_pages: int) -> None:
        self.pages = np.zeros((num_pages, self.page_size), np.uint64)

    def scribble(self, page: int) -> None:
        self.pages[page] = 0xDEAD

    def run(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        self.before(batch)
        return torch.from_numpy(compute(self.pages, batch, self.broken, self.facts.vocab_size))


def alone(request: Request, choose: Callable[[NDArray[np.float32], int], int] | None = None) -> list[int]:
    """The answer's tokens, greedy unless ``choose(logits, position)`` says otherwise."""
    history = 0
    answer: list[int] = []
    params = request.params
    position = 0
    tokens = list(request.prompt)
    while True:
        for token in tokens[position:]:
            phase = Phase.PREFILL if position < len(request.prompt) else Phase.DECODE
            history = (history + mix(stored(token, position, phase, history), position)) & MASK
            position += 1
        if len(answer) >= params.max_tokens:
            return answer
        logits = logits_of(history)
        answer.append(int(logits.argmax()) if choose is None else choose(logits, position))
        tokens.append(answer[-1])
        if (answer[-1] == EOS and not params.ignore_eos) or answer[-1] in params.stop_token_ids:
            return answer


def config(
    *,
    pages: int = 64,
    page_size: int = 4,
    tags: bool = True,
    prefix: bool = True,
    deterministic: bool = False,
    **scheduler: int,
) -> EngineConfig:
    return EngineConfig(
        ModelConfig(deterministic=deterministic),
        CacheConfig(page_size=page_size, kv_bytes=pages * PAGE_BYTES, has_tags=tags, has_prefix_cache=prefix),
        SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 16, **scheduler}),  # type: ignore[arg-type]
    )


def engine(
    settings: EngineConfig | None = None, runner: FakeRunner | None = None, **more: object
) -> tuple[Engine, FakeRunner]:
    settings = settings or config()
    runner = runner or FakeRunner(page_size=settings.cache.page_size)
    more.setdefault("vocabulary", WORDS)
    return Engine(runner, settings, **more), runner  # type: ignore[arg-type]


def request(name: str, prompt: Sequence[int], max_tokens: int = 8, **params: object) -> Request:
    params.setdefault("temperature", 0.0)
    return Request(name, tuple(prompt), SamplingParams(max_tokens, **params))  # type: ignore[arg-type]


class Answers:
    """Outputs put together per request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.text: dict[str, str] = {}
        self.last: dict[str, Output] = {}
        self.all: dict[str, list[Output]] = {}

    def add(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            name = output.request_id
            assert name not in self.last or self.last[name].finish is None, "an output after the last"
            self.tokens.setdefault(name, []).extend(output.token_ids)
            self.text[name] = self.text.get(name, "") + output.text
            self.last[name] = output
            self.all.setdefault(name, []).append(output)


def held(core: Engine) -> dict[str, list[tuple[int, int]]]:
    return {s.request_id: list(s.expected) for s in core.scheduler.running}


def drain(core: Engine, answers: Answers | None = None, *, max_steps: int = 5000) -> Answers:
    """Step until nothing is left; the pool is checked after each step, and empty in the end."""
    answers = answers or Answers()
    for _ in range(max_steps):
        if not core.has_work:
            break
        answers.add(core.step())
        core.pool.check_integrity(held(core))
    assert not core.has_work, "the engine makes no progress"
    counts = core.pool.counts()
    assert counts.used == counts.quarantined == 0
    return answers
