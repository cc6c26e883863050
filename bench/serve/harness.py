"""The engine without HTTP: requests in, and when each token came.

Figures of the engine are taken in the process that runs it, so that neither sockets nor JSON are measured; what
HTTP adds is measured where it belongs (``peers.py``). Contestants of one figure take turns in one process: the
speed of a shared machine changes by half from one minute to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from quantkit_serve.batch import Runner
from quantkit_serve.config import CacheConfig, EngineConfig, KvDtype, ModelConfig, SchedulerConfig, WeightSet
from quantkit_serve.engine.engine import Engine
from quantkit_serve.http.tokenizer import Tokenizer
from quantkit_serve.model.runner import open_runner
from quantkit_serve.request import FinishReason, Output, Request, SamplingParams

VOCAB = 4096  # of the bundled tokenizer
CONFIG = EngineConfig(
    ModelConfig(), CacheConfig(has_prefix_cache=False, kv_bytes=256 << 20), SchedulerConfig(max_num_seqs=64)
)


def tokenizer_folder(artifact: Path) -> Path:
    """Where an artifact keeps tokenizer.json."""
    return artifact / "decode"


def open_engine(
    artifact: Path,
    *,
    weights: WeightSet = "dual",
    kv_dtype: KvDtype = "fp8",
    kv_bytes: int = CONFIG.cache.kv_bytes,
    has_tags: bool = True,
    is_deterministic: bool = False,
    config: EngineConfig = CONFIG,
    engine_type: type[Engine] = Engine,
    wrapped: Callable[[Runner], Runner] = lambda runner: runner,
) -> Engine:
    """An engine over an artifact; without a prefix cache unless ``config`` has one."""
    config = replace(
        config,
        model=replace(config.model, weights=weights, deterministic=is_deterministic),
        cache=replace(config.cache, kv_dtype=kv_dtype, kv_bytes=kv_bytes, has_tags=has_tags),
    )
    vocabulary = Tokenizer.load(tokenizer_folder(artifact)).vocabulary
    return engine_type(wrapped(open_runner(artifact, config)), config, vocabulary)


def greedy(name: str, prompt: Sequence[int], max_tokens: int) -> Request:
    """A request that goes on to its last token."""
    return Request(name, tuple(prompt), SamplingParams(max_tokens, temperature=0.0, ignore_eos=True))


def prompts(count: int, length: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random token ids, special ones left out."""
    return [tuple(row) for row in np.random.default_rng(seed).integers(16, VOCAB, (count, length)).tolist()]


def same_load(count: int, input_len: int, output_len: int, seed: int = 0) -> list[Request]:
    """Requests of one length."""
    return [greedy(f"{seed}-{n}", prompt, output_len) for n, prompt in enumerate(prompts(count, input_len, seed))]


@dataclass
class Answer:
    """When the tokens of a request came, in seconds after the start of the run."""

    token_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None

    def take(self, output: Output, now: float) -> None:
        self.token_s += [now] * len(output.token_ids)
        self.tokens += output.token_ids
        self.finish, self.error = output.finish, output.error


@dataclass(frozen=True)
class Run:
    """What a load took."""

    seconds: float
    answers: dict[str, Answer]

    @property
    def output_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers.values())

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first, of the only request."""
        (answer,) = self.answers.values()
        return (len(answer.token_s) - 1) / (answer.token_s[-1] - answer.token_s[0])

    @property
    def first_token_s(self) -> float:
        return min(answer.token_s[0] for answer in self.answers.values())


def run(engine: Engine, requests: Iterable[Request]) -> Run:
    """Queue all and step until all are answered.

    Raises:
        RuntimeError: a request ended with an error; its figures would be worthless.
    """
    answers: dict[str, Answer] = {}
    start = time.perf_counter()
    for request in requests:
        engine.add(request)
        answers[request.request_id] = Answer()
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            answers[output.request_id].take(output, now)
    seconds = time.perf_counter() - start
    for name, answer in answers.items():
        if answer.finish is not FinishReason.LENGTH:
            raise RuntimeError(f"request {name} ended with {answer.finish}: {answer.error}")
    return Run(seconds, answers)


def in_turns(names: Sequence[str], rounds: int) -> Iterable[tuple[int, str]]:
    """(round, name): there and back again, so that nobody is always first."""
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            yield number, name
