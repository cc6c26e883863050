"""A run on disk: ``run.json`` and ``items.jsonl`` in one folder, written whole or not at all, read with suspicion.

``run.json`` says what was run and names count, bytes and SHA-256 of ``items.jsonl``, so that a run whose records
were cut short or changed is never compared. The folder is a run exactly while it has ``run.json``: that file goes
first when a run is replaced and comes last, so that old figures never stand beside new records. Other files of
the folder are left alone.

What is left out: figures. Everything is computed from the records again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quantkit.artifact.canonical import canonical_json, parse_json, readable_json, sha256_hex
from quantkit.artifact.durable import disk_errors, fsync_dir, read_regular, write_file
from quantkit.errors import ArtifactError, UsageError

from .run import CurvePoint, Item, Metric, Run, Skipped, Task
from .run_check import problem_of

if TYPE_CHECKING:
    from pydantic import BaseModel

    from .run_schema import Header

    Checked = TypeVar("Checked", bound=BaseModel)

FORMAT = "quantkit-eval-run"
VERSION = 1
HEADER, ITEMS = "run.json", "items.jsonl"


def write_run(run: Run, folder: Path) -> None:
    """Write a run into ``folder``, which is made if need be; a run that is there already is replaced.

    Raises:
        ArtifactError: the run contradicts itself or holds a number that is not finite; nothing was written.
        EnvironmentProblem: the disk refuses.
    """
    if problem := problem_of(run):
        raise ArtifactError(f"a run that can't be written: {problem}", where=str(folder))
    try:
        items = b"".join(canonical_json(_item_to_json(item)) + b"\n" for item in run.items)
        header = readable_json(_header_to_json(run, items))
        (header + items).decode()  # a lone surrogate could be written, and not be read again
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"a run that can't be written: {error}", where=str(folder)) from None
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / HEADER).unlink(missing_ok=True)
        fsync_dir(folder)
        write_file(folder / ITEMS, items)
        write_file(folder / HEADER, header)


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, whole or damaged."""
    return (folder / HEADER).is_file()


def read_run(folder: Path) -> Run:
    """The run in ``folder``.

    Raises:
        UsageError: there is none.
        ArtifactError: it is damaged, contradicts itself, or was written in a format that this version can't read.
    """
    if not (folder / HEADER).exists():
        raise UsageError(
            "no run is here" if folder.is_dir() else "no such folder", where=str(folder),
            accepted=f"a folder with {HEADER} and {ITEMS}, as `quantkit eval` writes it",
        )  # fmt: skip
    header = _read_header(folder / HEADER)
    run = Run(
        candidate=header.candidate,
        settings=header.settings,
        tasks=tuple(_task(task.model_dump()) for task in header.tasks),
        items=tuple(_read_items(folder / ITEMS, header)),
    )
    if problem := problem_of(run):
        raise ArtifactError(problem, where=str(folder))
    return run


def _item_to_json(item: Item) -> dict[str, Any]:
    data: dict[str, Any] = {
        "task": item.task,
        "item": item.item,
        "cluster": item.cluster,
        "prompt_sha256": item.prompt_sha256,
        "values": dict(item.values),
    }
    if item.weights:
        data["weights"] = dict(item.weights)
    if item.context_tokens is not None:
        data["context_tokens"] = item.context_tokens
    return data


def _header_to_json(run: Run, items: bytes) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": VERSION,
        "candidate": dict(run.candidate),
        "settings": dict(run.settings),
        "tasks": [_task_to_json(task) for task in run.tasks],
        "items": {"count": len(run.items), "bytes": len(items), "sha256": sha256_hex(items)},
    }


def _task_to_json(task: Task) -> dict[str, Any]:
    return {
        "name": task.name,
        "version": task.version,
        "path": task.path,
        "metrics": [asdict(metric) for metric in task.metrics],
        "skipped": [asdict(skipped) for skipped in task.skipped],
        "curves": {name: [asdict(point) for point in points] for name, points in task.curves.items()},
    }


def _task(data: dict[str, Any]) -> Task:
    return Task(
        name=data["name"],
        version=data["version"],
        path=data["path"],
        metrics=tuple(Metric(**metric) for metric in data["metrics"]),
        skipped=tuple(Skipped(**skipped) for skipped in data["skipped"]),
        curves={name: tuple(CurvePoint(**point) for point in points) for name, points in data["curves"].items()},
    )


def _read_header(path: Path) -> Header:
    """``run.json`` after its format and its shape were checked."""
    from .run_schema import Header

    try:
        data = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"can't be read as JSON: {error}", where=str(path)) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ArtifactError(f"no run of an evaluation: its format is not {FORMAT!r}", where=str(path))
    if data.get("format_version") != VERSION or isinstance(data["format_version"], bool):
        raise ArtifactError(
            f"written in version {data.get('format_version')!r} of the format", where=str(path),
            accepted=f"version {VERSION}", hint="A newer quantkit may read it, or run the evaluation again.",
        )  # fmt: skip
    return _checked(Header, data, str(path))


def _read_items(path: Path, header: Header) -> Iterator[Item]:
    from .run_schema import ItemLine

    try:
        data = read_regular(path)
    except OSError as error:
        raise ArtifactError(f"the records can't be read: {error.strerror}", where=str(path)) from None
    if len(data) != header.items.bytes:
        raise ArtifactError(
            f"{len(data):,} bytes where {HEADER} says {header.items.bytes:,}: cut short, or of another run",
            where=str(path),
        )
    if sha256_hex(data) != header.items.sha256:
        raise ArtifactError(f"the records were changed: their SHA-256 is not what {HEADER} says", where=str(path))
    lines = data.split(b"\n")
    if lines.pop() or len(lines) != header.items.count:
        raise ArtifactError(f"{len(lines):,} records where {HEADER} says {header.items.count:,}", where=str(path))
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        try:
            plain = json.loads(line.decode("utf-8", "surrogatepass"), object_pairs_hook=_without_duplicates)
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"not a JSON record: {error}", where=where) from None
        yield Item(**_checked(ItemLine, plain, where).model_dump())


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError("a key occurs twice")
    return data


def _checked(model: type[Checked], data: Any, where: str) -> Checked:
    """``data`` as the pydantic ``model``, or one error that lists all that is wrong with it."""
    from pydantic import ValidationError

    from quantkit.recipe.errors import problems_of

    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ArtifactError(problems_of(error, model), where=where) from None
