"""From names to tasks: bundled ones, files of one's own, whatever lm-eval knows, and suites of all of these."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from quantkit.errors import UsageError
from quantkit.recipe.document import parse_mapping, read_bytes
from quantkit.recipe.errors import nearest, problems_of

from ..bundled import bundled
from .schema import Suite, SuiteEntry, Suites
from .source import TaskSource, read_task

FOLDER = "tasks"
SUITES_FILE = "suites.yaml"
FIDELITY = "fidelity"  # beside all tasks: it needs the baseline and all candidates at once
T = TypeVar("T", Suite, Suites)
_ENDINGS = (".yaml", ".yml", ".json")


def task_names() -> list[str]:
    """Names of the tasks that come with quantkit, sorted."""
    return sorted(path.stem for path in bundled(FOLDER).glob("*.yaml") if path.name != SUITES_FILE)


def suite_names() -> list[str]:
    """Names of the suites that come with quantkit, sorted."""
    return sorted(read_suites().suites)


def find_tasks(names: Sequence[str], *, suite: str | None = None) -> list[TaskSource]:
    """Tasks by name, those of the suite first; each once.

    Args:
        names: bundled names, paths of task files, or names that lm-eval knows (groups are expanded). A bundled
            name wins over a file and over lm-eval; write ``./cloze`` for a file.
        suite: bundled name, or the path of a file with ``tasks:``; ``fidelity`` among them is none of ours
            (``has_fidelity``).

    Raises:
        UsageError: no tasks, an unknown name (with the nearest), a file that is not valid, two different tasks of
            one name.
        EnvironmentProblem: a task of lm-eval whose data or packages are not at hand.
    """
    entries = [(e, base) for e, base in _suite(suite) if e.task != FIDELITY] if suite is not None else []
    entries += [(SuiteEntry(task=name), Path()) for name in names]
    if not entries and suite is None:
        raise UsageError("no tasks are named", where="--task", accepted=", ".join(task_names()),
                         hint=f"Or a suite: {', '.join(suite_names())}.")  # fmt: skip
    found: dict[str, TaskSource] = {}
    for entry, base in entries:
        for task in _find(entry, base):
            other = found.setdefault(task.name, task)
            if other.version != task.version:
                raise UsageError(f"two different tasks are called {task.name!r}", where=entry.task,
                                 hint="Give one of them another `name:`.")  # fmt: skip
    return list(found.values())


def has_fidelity(suite: str) -> bool:
    """Whether a suite names ``fidelity``.

    Raises:
        UsageError: as ``find_tasks``.
    """
    return any(entry.task == FIDELITY for entry, _ in _suite(suite))


def _find(entry: SuiteEntry, base: Path) -> Sequence[TaskSource]:
    name = entry.task
    path = base / name
    if name in task_names():
        found: Sequence[TaskSource] = [read_task(bundled(FOLDER) / f"{name}.yaml")]
    elif "/" in name or name.endswith(_ENDINGS):
        if not path.is_file():
            raise UsageError("no such task file", where=str(path))
        found = [read_task(path)]
    else:
        from .named import known_names, load_named

        if name not in known_names():
            raise UsageError(f"no task {name!r}", where="--task",
                             accepted="a bundled name, the path of a task file, or a name that lm-eval knows",
                             hint=_near(name, [*task_names(), *known_names()]))  # fmt: skip
        return load_named(name, num_fewshot=entry.num_fewshot)
    if entry.num_fewshot is not None:
        raise UsageError("num_fewshot is for tasks of lm-eval", where=name)
    return found


def _suite(name: str) -> list[tuple[SuiteEntry, Path]]:
    """Entries of a suite, each with the folder that its paths start from."""
    suites = read_suites().suites
    if name in suites:
        return [(entry, bundled(FOLDER)) for entry in suites[name].tasks]
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"no suite or file {name!r}", where="--suite",
                         accepted=f"{', '.join(sorted(suites))} or the path of a YAML file",
                         hint=_near(name, sorted(suites)) if "/" not in name else None)  # fmt: skip
    return [(entry, path.parent) for entry in _read(path, Suite).tasks]


def _near(name: str, known: Sequence[str]) -> str | None:
    """The nearest name, if one is near; the list of all would be thousands long."""
    hint = nearest(name, known)
    return hint if hint.startswith("Did you mean") else None


def read_suites() -> Suites:
    return _read(bundled(FOLDER) / SUITES_FILE, Suites)


def _read(path: Path, model: type[T]) -> T:
    data = read_bytes(path, noun="suite", error=UsageError)
    plain, lines = parse_mapping(data, where=str(path), error=UsageError)
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        raise UsageError(problems_of(error, model, lines), where=str(path)) from None
