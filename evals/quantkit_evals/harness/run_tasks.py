"""Tasks of lm-eval on a candidate, as a ``Run`` with a record of every item.

lm-eval's evaluator builds the prompts, calls the candidate and judges the answers; its aggregates are not used.
What it logs of each item becomes values and weights of the task's metrics, as numbers. An item that could not be
scored is in the task's ``skipped``, with the reason. Anything that is not a number ends the run, naming task and
item.

A limit takes items spread evenly over the task, so that a bounded run still sees all of its documents; the same
limit takes the same items of every candidate.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol
from unittest.mock import patch

from quantkit.errors import ArtifactError, UsageError

from ..candidates.candidate import Candidate, OnProgress
from ..extras import require
from ..run import Item, Metric, Run, Skipped, Task

_PACKAGES = ("quantkit", "lm-eval", "transformers", "torch")


class TaskSource(Protocol):
    """A task that can be loaded (``tasks``).

    Attributes:
        name: unique in a run.
        version: SHA-256 of its definition and data.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def lm_eval_task(self) -> Any:
        """A task object of lm-eval with ``metrics``, ``cluster_of(doc)`` and ``item_id(doc)``."""


@dataclass(frozen=True)
class _Loaded:
    """A task.

    Attributes:
        task: of lm-eval.
        key: what lm-eval calls it in requests.
        ids: of its items, in order of its documents.
        chosen: indices of the items that are run, ascending.
    """

    source: TaskSource
    task: Any
    key: str
    ids: list[str]
    chosen: list[int]


def run_tasks(
    candidate: Candidate,
    tasks: Sequence[TaskSource],
    *,
    limit: int | None = None,
    seed: int = 0,
    cache: Path | None = None,
    on_progress: OnProgress = lambda _: None,
    is_chat: bool = False,
    window: int | None = None,
) -> Run:
    """Run the tasks; the records of all items.

    Args:
        limit: at most so many items of each task.
        seed: of few-shot examples and sampled answers.
        cache: folder of kept answers (``harness.cache.default_cache``); None keeps none.
        is_chat: prompts are put into the model's chat template.
        window: tokens at a time of texts that are longer, at most; None: as many as the candidate takes. Only
            texts cut alike compare, so the settings of a run that has such tasks state it.

    Raises:
        UsageError: no tasks, a task twice or without items, an item with nothing to score, an unsupported
            generation argument.
        ArtifactError: figures that are not numbers.
        EnvironmentProblem: a package is missing, an endpoint failed.
    """
    require("lm_eval")
    from .lm_eval_model import HarnessModel

    if limit is not None and limit < 1:
        raise UsageError(f"is {limit}", where="limit", accepted="1 or more, or none")
    loaded = _load(tasks, limit, seed)
    names = {one.key: one for one in loaded}
    model = HarnessModel(candidate, cache=cache, on_progress=on_progress, seed=seed, window=window)
    answers = model.answers
    answers.item_names = lambda place: f"task {names[place[0]].source.name}, item {_id(names[place[0]], place[1])}"
    with answers.cache:
        logged = _evaluate(model, loaded, is_chat)
    found = [_task_and_items(one, logged[one.key], model, candidate) for one in loaded]
    settings = {
        "seed": seed, "limit": limit, "chat": is_chat, "versions": {name: version(name) for name in _PACKAGES},
    }  # fmt: skip
    if any(is_windowed(one.task) for one in loaded):
        settings["window"] = model.max_length
    return Run(
        candidate=candidate.identity() | {"scored_tokens": _scored(loaded, model)},
        settings=settings,
        tasks=tuple(task for task, _ in found),
        items=tuple(item for _, items in found for item in items),
    )


def is_windowed(task: Any) -> bool:
    """Whether a task of lm-eval scores whole texts, window by window."""
    return bool(task.OUTPUT_TYPE == "loglikelihood_rolling")


class _Unused(dict[str, Any]):
    """In place of a task's aggregations: these would stumble over what is not a number before we can say so."""

    def __missing__(self, metric: str) -> Any:
        return lambda values: 0.0


def _load(tasks: Sequence[TaskSource], limit: int | None, seed: int) -> list[_Loaded]:
    if not tasks:
        raise UsageError("no tasks to run", where="tasks")
    found: list[_Loaded] = []
    for source in tasks:
        if any(one.source.name == source.name for one in found):
            raise UsageError("the task is there twice", where=source.name)
        task = source.lm_eval_task()
        docs = list(task.eval_docs)
        if not docs:
            raise UsageError("the task has no items", where=source.name)
        task.set_fewshot_seed(seed=seed)
        task.aggregation = _Unused
        key = str(task.config.task)
        if any(one.key == key for one in found):
            raise UsageError(f"another task is called {key!r}, too", where=source.name)
        count = len(docs) if limit is None else min(limit, len(docs))
        chosen = [index * len(docs) // count for index in range(count)]
        found.append(_Loaded(source, task, key, _unique(str(task.item_id(doc)) for doc in docs), chosen))
    return found


def _unique(ids: Iterable[str]) -> list[str]:
    """Equal documents are told apart by their order."""
    times: Counter[str] = Counter()
    found = []
    for name in ids:
        times[name] += 1
        found.append(name if times[name] == 1 else f"{name} ({times[name]})")
    return found


def _evaluate(model: Any, loaded: Sequence[_Loaded], is_chat: bool) -> Mapping[str, list[dict[str, Any]]]:
    """What lm-eval logs of every item, by task."""
    from lm_eval.evaluator import evaluate

    with _silent():
        results = evaluate(
            model,
            {"tasks": {one.key: one.task for one in loaded}, "groups": {}},
            samples={one.key: one.chosen for one in loaded if len(one.chosen) < len(one.ids)},
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=is_chat,
            fewshot_as_multiturn=is_chat,
        )
    samples: Mapping[str, list[dict[str, Any]]] = results["samples"]
    return samples


@contextmanager
def _silent() -> Iterator[None]:
    """Without lm-eval's talk; its bar of prompts that are built has no other switch."""
    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with patch("lm_eval.api.task.tqdm", lambda docs, **_: docs):
            yield
    finally:
        log.setLevel(level)


def _task_and_items(
    one: _Loaded, logged: Sequence[dict[str, Any]], model: Any, candidate: Candidate
) -> tuple[Task, list[Item]]:
    name, metrics = one.source.name, tuple(one.task.metrics)
    filters = list(dict.fromkeys(sample["filter"] for sample in logged))
    by_doc: dict[int, dict[str, dict[str, Any]]] = {}
    for sample in logged:
        by_doc.setdefault(int(sample["doc_id"]), {})[sample["filter"]] = sample
    items, skipped = [], []
    for index, doc_id in enumerate(one.chosen):
        place, item = (one.key, index), one.ids[doc_id]
        if place in model.answers.skipped:
            skipped.append(Skipped(item, model.answers.skipped[place]))
            continue
        samples = by_doc[doc_id]
        where = f"task {name}, item {item}"
        values = {metric.name: _value(metric, samples, filters, where) for metric in metrics}
        sample = samples[filters[0]]
        items.append(
            Item(
                task=name,
                item=item,
                cluster=str(one.task.cluster_of(sample["doc"])),
                prompt_sha256=_digest(sample["arguments"], model.windows.get(place)),
                values={metric: value for metric, (value, _) in values.items()},
                weights={metric: weight for metric, (_, weight) in values.items() if weight != 1},
                context_tokens=model.answers.context_tokens.get(place),
            )
        )
    path = _path(one, model, candidate)
    if not items and path == "prefill":  # nothing was scored at all: by which path it would have been
        path = candidate.path
    return Task(name, one.source.version, path, metrics, tuple(skipped)), items


def _path(one: _Loaded, model: Any, candidate: Candidate) -> Literal["prefill", "decode", "generate", "unknown"]:
    """As it was: where contexts end in prefill, continuations of one token never enter decode, whatever the
    candidate's path is called."""
    kinds = {instance.request_type for instance in one.task.instances}
    if kinds == {"generate_until"}:
        return "generate"
    if candidate.path == "decode" and not model.scored_tokens.get(one.key, (0, 0))[1]:
        return "prefill"
    return candidate.path


def _value(
    metric: Metric, samples: Mapping[str, dict[str, Any]], filters: Sequence[str], where: str
) -> tuple[float, float]:
    """(value, weight) of what lm-eval has for a metric: a number, or a number and its weight.

    ``NAME,FILTER`` is the metric behind one of lm-eval's filters, ``NAME`` behind the first. lm-eval's values for
    perplexities are log-likelihoods.

    Raises:
        UsageError: the task has no such metric.
        ArtifactError: not a number.
    """
    name, _, own_filter = metric.name.partition(",")
    sample = samples.get(own_filter or filters[0], {})
    if name not in sample.get("metrics", ()):
        has = ", ".join(sorted({m for s in samples.values() for m in s["metrics"]}))
        raise UsageError(f"no metric {metric.name!r}", where=where, accepted=has)
    raw = sample[name]
    value, weight = raw if isinstance(raw, tuple | list) and len(raw) == 2 else (raw, 1.0)
    try:
        value, weight = float(value), float(weight)
    except (TypeError, ValueError):
        raise ArtifactError(f"{metric.name} is {raw!r}, not a number", where=where) from None
    if isinstance(raw, str) or not (math.isfinite(value) and math.isfinite(weight) and weight > 0):
        raise ArtifactError(f"{metric.name} is {raw!r}, not a number", where=where)
    return (-value if metric.kind == "perplexity" else value), weight


def _digest(arguments: Any, windows: str | None) -> str:
    """Of what was asked, and of how it was cut, if it was: other windows give other figures."""
    asked = arguments if windows is None else [arguments, windows]
    text = json.dumps(asked, sort_keys=True, ensure_ascii=False, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _id(one: _Loaded, index: int) -> str:
    return one.ids[one.chosen[index]]


def _scored(loaded: Sequence[_Loaded], model: Any) -> dict[str, dict[str, int]]:
    """Of each task: tokens scored, and those of them whose distribution a decode step gave."""
    found = {}
    for one in loaded:
        if one.key in model.scored_tokens:
            scored, decoded = model.scored_tokens[one.key]
            found[one.source.name] = {"tokens": scored, "decoded": decoded}
    return found
