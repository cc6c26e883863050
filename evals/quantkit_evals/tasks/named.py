"""Tasks by the names that lm-eval knows them by, groups and tags expanded, with what our records need.

lm-eval loads a task's data with the task, from the Hub or from what is at hand. Where it is not, or where a
task needs a package that is missing, that is one error with one line of reason.

Only metrics that are a sum over items can be compared item by item. Others (F1 over the corpus, correlations)
are left out; a task that has no other metric is refused, and so are tasks that run code which the model writes,
and tasks with images or sound.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Any

from quantkit.errors import EnvironmentProblem, UsageError
from quantkit.recipe.errors import nearest

from ..extras import require
from ..run import Metric
from .source import ScoredBy

_RIGHT_OR_WRONG = {
    "acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match",
    "prompt_level_strict_acc", "prompt_level_loose_acc",
}  # fmt: skip
_ALWAYS = {"prompt_level_strict_acc", "prompt_level_loose_acc"}  # 0 or 1 though the task computes them itself
_UNITS = {"word_perplexity": "nats/word", "byte_perplexity": "nats/byte", "perplexity": "nats/item"}
_PASSAGE = ("passage", "article", "paragraph", "story")  # fields that items of one document share
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class NamedTask:
    """A task of lm-eval; see ``TaskSource``.

    Attributes:
        task: lm-eval's object.
    """

    name: str
    task: Any = field(repr=False)
    metrics: tuple[Metric, ...]
    version: str

    @property
    def description(self) -> str:
        return f"lm-eval {version('lm-eval')}"

    @property
    def num_items(self) -> int:
        return len(self.task.eval_docs)

    @property
    def paths(self) -> tuple[ScoredBy, ...]:
        return ("generate",) if self.task.OUTPUT_TYPE == "generate_until" else ("prefill", "decode")

    def lm_eval_task(self) -> Any:
        """The object, with ``metrics``, ``item_id`` and ``cluster_of``; equal documents have equal ids."""
        self.task.metrics = self.metrics
        self.task.item_id = _item_id
        self.task.cluster_of = _cluster
        return self.task


def known_names() -> Sequence[str]:
    """All tasks, groups and tags of the installed lm-eval."""
    names: list[str] = _manager().all_tasks
    return names


def load_named(name: str, *, num_fewshot: int | None = None) -> list[NamedTask]:
    """The tasks that a name stands for, with their data.

    Args:
        num_fewshot: examples before each item; None leaves it to the task.

    Raises:
        UsageError: lm-eval has no such name; a task that can't be compared.
        EnvironmentProblem: lm-eval or another package is not installed, or data is not at hand.
    """
    if name not in known_names():
        raise UsageError(f"lm-eval has no task {name!r}", hint=nearest(name, known_names()))
    with _quiet():
        try:
            loaded = _manager().load([name])["tasks"]
        except ModuleNotFoundError as error:
            raise EnvironmentProblem(
                f"this task of lm-eval needs {error.name}, which is not installed",
                where=name, hint=f"Run: pip install {error.name}.",
            ) from None  # fmt: skip
        except Exception as error:  # whatever datasets, the Hub's client or a task's own code raise
            raise EnvironmentProblem(
                f"its data can't be loaded: {_first_line(error)}",
                where=name,
                hint="It comes from the Hugging Face Hub or its cache. The suite `quick` needs no network.",
            ) from None
        return [_named(key, task, num_fewshot) for key, task in loaded.items()]


@cache
def _manager() -> Any:
    require("lm_eval")
    from lm_eval.tasks import TaskManager

    with _quiet():
        return TaskManager()


def _named(name: str, task: Any, num_fewshot: int | None) -> NamedTask:
    if getattr(task, "UNSAFE_CODE", False):
        raise UsageError("this task runs code that the model writes, which is not done here", where=name)
    if getattr(task, "MULTIMODAL", False):
        raise UsageError("this task has images or sound", where=name, accepted="tasks of text")
    if num_fewshot is not None and task.get_config("num_fewshot") != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    metrics = tuple(_metrics(task))
    if not metrics:
        raise UsageError(
            "no metric of this task is a sum over its items", where=name,
            accepted="accuracies, means and perplexities", hint=f"It has {', '.join(task.aggregation())}.",
        )  # fmt: skip
    return NamedTask(name, task, metrics, _version(task))


def _metrics(task: Any) -> Iterator[Metric]:
    """``NAME`` behind the first filter, ``NAME,FILTER`` behind the others."""
    better = task.higher_is_better()
    filters = [one.name for one in getattr(task, "_filters", [])] or ["none"]
    for name, aggregation in task.aggregation().items():
        kind = _kind(task, name, getattr(aggregation, "__name__", ""))
        if kind is None:
            continue
        for number, one in enumerate(filters):
            full = f"{name},{one}" if number else name
            unit = "%" if kind in ("accuracy", "share") else _UNITS.get(name, "")
            yield Metric(full, kind, bool(better.get(name, True)), unit)


def _kind(task: Any, name: str, aggregation: str) -> Any:
    if aggregation in ("perplexity", "weighted_perplexity"):
        return "perplexity"
    if aggregation != "mean":
        return None
    is_own = callable(task.get_config("process_results")) and name not in _ALWAYS
    if name in _RIGHT_OR_WRONG:
        return "share" if is_own else "accuracy"  # its own values may be fractions (truthfulqa_mc2: a probability)
    return "mean"


def _version(task: Any) -> str:
    """Of the definition (with the functions' sources) and of all documents."""
    digest = hashlib.sha256(f"lm-eval {version('lm-eval')}\n".encode())
    digest.update(_ADDRESS.sub("", _json(task.dump_config())).encode())
    for doc in task.eval_docs:
        digest.update(_json(doc).encode() + b"\n")
    return digest.hexdigest()


def _item_id(doc: Any) -> str:
    return hashlib.sha256(_json(doc).encode()).hexdigest()[:16]


def _cluster(doc: Any) -> str:
    """The document that an item is about, where a field of a usual name holds one; else the item itself."""
    if isinstance(doc, Mapping):
        for key in _PASSAGE:
            if isinstance(doc.get(key), str) and doc[key]:
                return f"{key}-{hashlib.sha256(doc[key].encode()).hexdigest()[:16]}"
    return _item_id(doc)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what lm-eval and the Hub's client say on the way: an error says it once."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "huggingface_hub", "datasets")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
