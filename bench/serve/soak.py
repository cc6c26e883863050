"""Figure 5: thousands of requests with random lengths and aborts in a pool that is too small for them.

    python bench/serve/soak.py [--size mid|small] [--models DIR] [--json FILE.json] [--requests 5000]

``--deterministic`` serving of tiny-glm. Requests are drawn from some hundred prompts, greedy and sampled with a
seed, with random numbers of tokens; each prompt was answered alone before, to its full length, by an engine of its
own. Every answer, aborted ones too, must be the beginning of that answer, token by token. Aborts come while the
model computes, and hit waiting and running requests. In the end every page must be free or cached. The slope of
the resident size is of the second half of the requests, when pools and caches have their size (least squares).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import model
import numpy as np
import psutil
from harness import CONFIG, open_engine, prompts
from options import Options, script
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measure import Row
from quantkit_serve.batch import Batch, Runner
from quantkit_serve.engine.engine import Engine
from quantkit_serve.request import FinishReason, Output, Request, SamplingParams

REQUESTS, PROMPTS, LONGEST_IN, LONGEST_OUT = 5000, 200, 96, 64
PAGES, PAGE_SIZE, AT_ONCE, IN_ENGINE = 24, 16, 16, 32
ABORTS_PER_STEP = 0.1
SAMPLE_EVERY = 50  # requests between two looks at the memory
FLAT = 1024.0  # bytes per request


class Interrupted:
    """A runner that is interrupted in the middle of every step."""

    def __init__(self, inner: Runner) -> None:
        self.facts, self.allocate, self._inner = inner.facts, inner.allocate, inner
        self.interrupt: Callable[[], None] = lambda: None

    def run(self, batch: Batch) -> Tensor:
        logits = self._inner.run(batch)
        self.interrupt()
        return logits


@dataclass(frozen=True)
class Known:
    """A prompt with its answer alone, to the longest length."""

    prompt: tuple[int, ...]
    params: SamplingParams
    answer: tuple[int, ...]


def engine_of(artifact: Path, wrapped: Callable[[Runner], Runner] | None = None) -> Engine:
    """With a small pool and a prefix cache if its runner is ``wrapped``."""
    config = replace(
        CONFIG,
        cache=replace(CONFIG.cache, page_size=PAGE_SIZE, has_prefix_cache=wrapped is not None),
        scheduler=replace(CONFIG.scheduler, max_num_seqs=AT_ONCE, max_num_batched_tokens=128),
    )
    if wrapped is None:
        return open_engine(artifact, is_deterministic=True, config=config)
    page_bytes = open_engine(artifact, is_deterministic=True, config=config).facts.page_bytes
    memory = PAGES * page_bytes
    return open_engine(artifact, is_deterministic=True, config=config, kv_bytes=memory, wrapped=wrapped)


def alone(artifact: Path, count: int) -> list[Known]:
    """Answers of requests that have the engine to themselves."""
    engine, rng = engine_of(artifact), random.Random(0)
    found = []
    for number, prompt in enumerate(prompts(count, LONGEST_IN)):
        params = SamplingParams(LONGEST_OUT, temperature=number % 2, top_p=0.95, seed=number, ignore_eos=True)
        known = Known(prompt[: rng.randint(1, LONGEST_IN)], params, ())
        engine.add(Request("alone", known.prompt, params))
        tokens: list[int] = []
        while engine.has_work:
            for output in engine.step():
                tokens += output.token_ids
        found.append(replace(known, answer=tuple(tokens)))
    return found


class Soak:
    """Keeps ``IN_ENGINE`` requests in an engine, and holds what comes out against what is known.

    Attributes:
        crossed: answers that differ from the known one.
        errors: requests that ended with an error.
        finished: by reason.
        resident: (requests answered, bytes).
    """

    def __init__(self, engine: Engine, known: list[Known], count: int) -> None:
        self.engine, self.rng = engine, random.Random(1)
        self.finished = dict.fromkeys(FinishReason, 0)
        self.crossed = 0
        self.errors: list[str] = []
        self.resident: list[tuple[int, int]] = []
        self._known, self._count = known, count
        self._live: dict[str, tuple[Known, int, list[int]]] = {}
        self._process = psutil.Process()

    def run(self) -> None:
        waiting = self._requests()
        while True:
            while len(self._live) < IN_ENGINE and (request := next(waiting, None)) is not None:
                self.engine.add(request)
            if not self._live:
                return
            for output in self.engine.step():
                self._take(output)

    def interrupt(self) -> None:
        """Perhaps abort one, while a step runs."""
        if self.rng.random() < ABORTS_PER_STEP:
            last = self.engine.abort(self.rng.choice(list(self._live)))
            if last is not None:
                self._take(last)

    def _requests(self) -> Iterator[Request]:
        for number in range(self._count):
            known = self.rng.choice(self._known)
            length = self.rng.randint(1, LONGEST_OUT)
            name = f"r{number}"
            self._live[name] = (known, length, [])
            yield Request(name, known.prompt, replace(known.params, max_tokens=length))

    def _take(self, output: Output) -> None:
        known, length, tokens = self._live[output.request_id]
        tokens += output.token_ids
        if output.finish is None:
            return
        del self._live[output.request_id]
        self.finished[output.finish] += 1
        if output.finish is FinishReason.ERROR:
            self.errors.append(output.error or "")
        is_whole = output.finish is not FinishReason.LENGTH or len(tokens) == length
        self.crossed += not is_whole or tuple(tokens) != known.answer[: len(tokens)]
        done = sum(self.finished.values())
        if done % SAMPLE_EVERY == 0:
            self.resident.append((done, self._process.memory_info().rss))

    @property
    def slope(self) -> float:
        """Bytes per request, of the second half."""
        half = np.array(self.resident[len(self.resident) // 2 :], float)
        return float(np.polyfit(half[:, 0], half[:, 1], 1)[0]) if len(half) > 1 else 0.0


def leaked(engine: Engine) -> int:
    """Pages that are neither free nor in the prefix cache.

    Raises:
        IntegrityError: a page is in two states, or counts don't match.
    """
    engine.pool.check_integrity()
    counts = engine.pool.counts()
    return engine.pool.num_pages - counts.free - counts.cached


def rows(options: Options) -> list[Row]:
    count = options.requests or (300 if options.is_small else REQUESTS)
    artifact = model.artifact("tiny-glm", options)
    known = alone(artifact, min(PROMPTS, max(count // 4, 1)))
    runners: list[Interrupted] = []

    def wrapped(inner: Runner) -> Runner:
        runners.append(Interrupted(inner))
        return runners[0]

    engine = engine_of(artifact, wrapped)
    soak = Soak(engine, known, count)
    runners[0].interrupt = soak.interrupt
    soak.run()
    figures = engine.figures()
    leaks, slope, megabytes = leaked(engine), soak.slope, soak.resident[-1][1] / 2**20
    preempted, aborted = figures.preemptions, soak.finished[FinishReason.ABORT]
    return [
        Row(f"soak: requests, pool of {PAGES} pages of {PAGE_SIZE}, up to {AT_ONCE} at once", count, ""),
        Row("  aborted", aborted, "", None, None, "> 0", aborted > 0),
        Row("  preemptions", preempted, "", None, None, "> 0", preempted > 0),
        Row("  tokens taken from the prefix cache", figures.cached_tokens, "tokens"),
        Row("  tag checks", figures.kv_tag_checks, "", "mismatches", figures.kv_tag_mismatches, "none",
            figures.kv_tag_mismatches == 0),
        Row("  answers unlike the same request alone", soak.crossed, "", None, None, "0", soak.crossed == 0),
        Row("  requests that ended with an error", len(soak.errors), "", None, None, "0", not soak.errors),
        Row("  pages leaked", leaks, "", None, None, "0", leaks == 0),
        Row("  resident memory, slope of the second half", slope, "B/request", "in the end, MiB", megabytes,
            f"<= {FLAT:.0f}", slope <= FLAT),
    ]  # fmt: skip


if __name__ == "__main__":
    script(rows, __doc__)
