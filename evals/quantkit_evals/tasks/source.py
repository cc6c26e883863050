"""A task of ours, read and checked: its items, its version, its metrics, and the object that lm-eval runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import ValidationError

from quantkit.errors import UsageError
from quantkit.recipe.document import parse_mapping, read_bytes
from quantkit.recipe.errors import problems_of

from ..run import Metric
from .items import MAX_BYTES, read_items
from .schema import NAME, TaskFile

FORMAT = b"quantkit task 1\n"  # changes when the same files would ask something else
ScoredBy = Literal["prefill", "decode", "generate"]
METRIC: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("acc", "accuracy", True, "%"),
        Metric("acc_norm", "accuracy", True, "%"),
        Metric("acc_mutual_info", "accuracy", True, "%"),
        Metric("exact_match", "accuracy", True, "%"),
        Metric("valid", "accuracy", True, "%"),
        Metric("field_match", "share", True, "%"),
        Metric("perplexity", "perplexity", False, "nats/word"),
        Metric("word_perplexity", "perplexity", False, "nats/word"),
        Metric("byte_perplexity", "perplexity", False, "nats/byte"),
    )
}


class TaskSource(Protocol):
    """A task that can be run.

    Attributes:
        name: unique among the tasks of a run.
        version: SHA-256 of its definition and its items.
        metrics: the main one first.
        paths: by which it may be scored: continuations by prefill or decode, answers by generating.
        description: one line.
        num_items: how many.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def metrics(self) -> tuple[Metric, ...]: ...
    @property
    def paths(self) -> tuple[ScoredBy, ...]: ...
    @property
    def description(self) -> str: ...
    @property
    def num_items(self) -> int: ...

    def lm_eval_task(self) -> Any:
        """A task object of lm-eval with ``metrics``, ``cluster_of(doc)`` and ``item_id(doc)``."""


@dataclass(frozen=True)
class OwnTask:
    """A task from a YAML file; see ``TaskSource``.

    Attributes:
        definition: the file.
        items: with ``id``, ``cluster``, and the fields of the kind.
    """

    name: str
    version: str
    definition: TaskFile
    items: tuple[Mapping[str, Any], ...] = field(repr=False)

    @property
    def description(self) -> str:
        return self.definition.description

    @property
    def num_items(self) -> int:
        return len(self.items)

    @property
    def num_clusters(self) -> int:
        return len({item["cluster"] for item in self.items})

    @property
    def paths(self) -> tuple[ScoredBy, ...]:
        return ("generate",) if self.definition.kind == "generate" else ("prefill", "decode")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return tuple(METRIC[name] for name in self.definition.metrics or self._default_metrics())

    def _default_metrics(self) -> list[str]:
        if self.definition.kind == "generate":
            from .answers import metrics_of

            return [name for name in metrics_of(self.items[0]) if all(name in metrics_of(i) for i in self.items)]
        return {
            "choice": ["acc", "acc_norm"],  # the mutual information doubles the requests: when asked for
            "cloze": ["acc", "perplexity"],
            "perplexity": ["word_perplexity", "byte_perplexity"],
        }[self.definition.kind]

    def lm_eval_task(self) -> Any:
        """A new one each time, since lm-eval keeps its requests in it."""
        from ..extras import require

        require("lm_eval")
        from .in_memory import InMemoryTask

        return InMemoryTask(self.name, self.version, self.definition, self.metrics, self.items)


def read_task(path: Path) -> OwnTask:
    """The task of a YAML file and of the JSON lines that it names.

    Raises:
        UsageError: unreadable, not following the schema (all problems in one message), data outside of the file's
            folder, or the first line of the data that can't be used.
    """
    text = read_bytes(path, noun="task", error=UsageError)
    plain, lines = parse_mapping(text, where=str(path), error=UsageError)
    try:
        definition = TaskFile.model_validate(plain)
    except ValidationError as error:
        raise UsageError(problems_of(error, TaskFile, lines), where=str(path)) from None
    name = definition.name or path.stem
    if not re.fullmatch(NAME, name):
        raise UsageError(f"the file's name {name!r} is no task's name", where=str(path), hint="Say `name:` in it.")
    data_path = _data_path(path, definition.data)
    data = _read_data(data_path, path)
    items = read_items(data_path, data, definition)
    version = sha256(FORMAT + sha256(text).digest() + sha256(data).digest()).hexdigest()
    if definition.kind == "generate":
        items = tuple(_with_targets(items, data_path))
    task = OwnTask(name, version, definition, items)
    if definition.kind == "generate":
        _check_metrics(task, data_path)
    return task


def _data_path(task: Path, data: str) -> Path:
    """Only what lies beside the file or below: a task that is passed on takes no other file with it."""
    found = task.parent / data
    if not data.isprintable():  # a zero byte is in no path
        raise UsageError(f"data: {data!r} is no file's name", where=str(task))
    if Path(data).is_absolute() or not found.resolve().is_relative_to(task.parent.resolve()):
        raise UsageError(
            f"data: {data} lies outside of the task's folder",
            where=str(task),
            accepted="a file beside it or below",
        )
    return found


def _read_data(path: Path, task: Path) -> bytes:
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for
        raise UsageError(f"data: {path.name} is no file", where=str(task))
    try:
        with open(path, "rb") as handle:
            data = handle.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"data: {path.name} cannot be read: {why}", where=str(task)) from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"data: {path.name} has more than {MAX_BYTES:,} bytes", where=str(task))
    return data


def _with_targets(items: Iterable[dict[str, Any]], where: Path) -> Iterator[dict[str, Any]]:
    """The items; every schema can be checked against, every target is a JSON value that follows its own."""
    from .answers import json_target, validator

    known: dict[str, Any] = {}
    for item in items:
        if "json_schema" in item:
            at, key = f"{where}, item {item['id']}", repr(item["json_schema"])
            if key not in known:
                known[key] = validator(item["json_schema"], at)
            if "target" in item:
                try:
                    item = item | {"target": json_target(item["target"], known[key])}
                except ValueError as error:
                    raise UsageError(str(error), where=at) from None
        yield item


def _check_metrics(task: OwnTask, where: Path) -> None:
    """Every metric exists for all items."""
    from .answers import metrics_of

    for item in task.items:
        at = f"{where}, item {item['id']}"
        missing = [name for name in task.definition.metrics or () if name not in metrics_of(item)]
        if missing:
            raise UsageError(
                f"nothing to make {', '.join(missing)} of", where=at, accepted=", ".join(metrics_of(item))
            )
    if not task.metrics:
        raise UsageError("no metric can be made of all items", where=str(where), accepted="alike items")
