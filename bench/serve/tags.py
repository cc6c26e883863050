"""Figure 3: what the tag check costs: on, off, and a build without the call.

    python bench/serve/tags.py [--size mid|small] [--models DIR] [--json FILE.json]

Three engines answer the same requests in step: each step of the load is taken by one after the other, so that
whatever the machine does meanwhile hits all of them. What else could tell them apart is taken away:

- They share one runner, weights and pages both: none lies better in memory than the others. They have the same
  pages and store the same bytes in them, which is checked.
- The order is drawn anew for every step. Of A B C, C B A the outer two would often find in the caches what they
  have just left there themselves, and the middle one never.

A run is one load; throughput is its tokens over the sum of its steps, latency the 95th percentile of its decode
steps, which is what lies between two tokens. The confidence intervals (95 %) are of the mean over runs of the
relative difference, a fifth of the runs trimmed at either end (Tukey and McLaughlin, 1963): a disturbance on a
shared machine makes one run a hundred times as different as the others, and a plain mean then tells about
neighbours. The cost holds if the upper end is below the target, and can't be told from nothing if the interval
holds zero.

tiny-glm is used in both sizes: its steps are the shortest, so the check weighs most.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import model
import numpy as np
from harness import open_engine, same_load
from options import Options, script

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measure import Row
from quantkit_serve.batch import Batch, Runner
from quantkit_serve.engine.batching import build
from quantkit_serve.engine.engine import Engine, Flight
from quantkit_serve.phase import Phase
from quantkit_serve.request import Output

REQUESTS, INPUT_LEN, OUTPUT_LEN = 16, 96, 96
RUNS = 200
TARGET = 0.01
TRIMMED = 0.2  # of the runs, at either end


class Unchecked(Engine):
    """An engine in whose code there is no check."""

    def _launch(self, outputs: list[Output], lane: Phase | None) -> Flight | None:
        plan = self.scheduler.schedule(lane)
        if plan is None:
            return None
        runs = plan.runs
        table = self.tables.fill([run.sequence.table for run in runs], [run.sequence.expected for run in runs])
        batch, rows = build(plan, table)
        return Flight(plan, batch, rows, self.pool.launch(table, self.tables.counts))


class Shared:
    """A runner that several engines use, each as if it were its own."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self.facts = runner, runner.facts
        self._num_pages = 0

    def allocate(self, num_pages: int) -> None:
        if not self._num_pages:
            self._runner.allocate(num_pages)
            self._num_pages = num_pages
        if num_pages != self._num_pages:
            raise RuntimeError(f"pools of {self._num_pages} and {num_pages} pages can't be one")

    def run(self, batch: Batch) -> Any:
        return self._runner.run(batch)


def open_engines(artifact: Path) -> dict[str, Engine]:
    """On, off, and without the check in its code."""
    shared: list[Shared] = []

    def same(runner: Runner) -> Shared:
        shared.append(Shared(runner))
        return shared[0]

    return {
        "on": open_engine(artifact, wrapped=same),
        "off": open_engine(artifact, has_tags=False, wrapped=same),
        "without": open_engine(artifact, has_tags=False, engine_type=Unchecked, wrapped=same),
    }


@dataclass(frozen=True)
class Times:
    """Seconds of the steps of one run.

    Attributes:
        total: of all.
        p95: of decode steps.
    """

    total: float
    p95: float


def run_in_step(engines: dict[str, Engine], seed: int) -> dict[str, Times]:
    """One load through all engines, a step of each in turn.

    Raises:
        RuntimeError: they didn't do the same work.
    """
    requests = same_load(REQUESTS, INPUT_LEN, OUTPUT_LEN, seed=seed)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        for request in requests:
            engine.add(request)
    names, step, rng = list(engines), 0, random.Random(seed)
    while any(engine.has_work for engine in engines.values()):
        for name in rng.sample(names, len(names)):
            start = time.perf_counter()
            engines[name].step()
            seconds[name].append(time.perf_counter() - start)
        step += 1
        states = [[(s.tokens, [*s.table]) for s in engine.scheduler.running] for engine in engines.values()]
        if any(state != states[0] for state in states):
            raise RuntimeError("the engines have different tokens or pages")
    phases = {
        name: [kind for _, _, kind, *_ in engine.figures().steps][-step:] for name, engine in engines.items()
    }
    if any(kinds != phases[names[0]] for kinds in phases.values()):
        raise RuntimeError("the engines took different steps")
    is_decode = np.array([kind == "decode" for kind in phases[names[0]]])
    return {
        name: Times(sum(times), float(np.percentile(np.array(times)[is_decode], 95)))
        for name, times in seconds.items()
    }


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Trimmed mean, and both ends of its 95 % confidence interval, from the winsorized variance."""
    from scipy import stats

    values = np.sort(differences)
    count, cut = len(values), int(TRIMMED * len(values))
    mean = float(values[cut : count - cut].mean())
    winsorized = np.clip(values, values[cut], values[count - cut - 1])
    error = float(winsorized.std(ddof=1) / ((1 - 2 * TRIMMED) * np.sqrt(count)))
    reach = float(stats.t.ppf(0.975, count - 2 * cut - 1)) * error
    return mean, mean - reach, mean + reach


def difference_rows(label: str, differences: Sequence[float], *, is_nothing: bool = False) -> list[Row]:
    """In percent; ``is_nothing``: the interval should hold zero."""
    mean, low, high = (100 * value for value in interval(differences))
    target, holds = ("interval holds 0", low <= 0 <= high) if is_nothing else ("< 1 %", high < 100 * TARGET)
    return [
        Row(label, mean, "%"),
        Row("  95 % confidence, from", low, "%"),
        Row("  to", high, "%", None, None, target, holds),
    ]


def rows(options: Options) -> list[Row]:
    artifact = model.artifact("tiny-glm", options)
    engines = open_engines(artifact)
    run_in_step(engines, 0)
    runs = [run_in_step(engines, seed) for seed in range(1, 1 + (3 if options.is_small else RUNS))]

    def relative(one: str, other: str, what: str) -> list[float]:
        return [getattr(run[one], what) / getattr(run[other], what) - 1 for run in runs]

    on, off = (REQUESTS * OUTPUT_LEN / min(run[name].total for run in runs) for name in ("on", "off"))
    title = f"tiny-glm, {REQUESTS} requests at once, {len(runs)} runs: tags on"
    rows = [Row(title, on, "tok/s", "off", off)]
    rows += difference_rows("tags on: more time for the same tokens than off", relative("on", "off", "total"))
    rows += difference_rows("tags on: p95 between tokens above off's", relative("on", "off", "p95"))
    for label, what in (("more time for the same tokens", "total"), ("p95 between tokens above", "p95")):
        found = relative("off", "without", what)
        rows += difference_rows(f"tags off against no check in the code: {label}", found, is_nothing=True)
    return rows


if __name__ == "__main__":
    script(rows, __doc__)
