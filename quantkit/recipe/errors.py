"""Messages for recipes that do not follow the schema: all errors at once, each with the nearest valid key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from ..errors import RecipeError

Path = tuple[str | int, ...]


def unknown_option(option: str, known: Iterable[str]) -> RecipeError:
    """An option that no section has."""
    return RecipeError(f"unknown recipe option {option!r}", hint=nearest(option, known))


def nearest(word: str, known: Iterable[str]) -> str:
    """``Did you mean 'group_size'?``, or the list of what there is."""
    known = sorted(known)
    close = get_close_matches(word, known, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Valid keys: {', '.join(known)}."


def from_validation(
    error: ValidationError, model: type[BaseModel], where: str, lines: Mapping[Path, int] | None = None
) -> RecipeError:
    """One error that lists every problem, with its line when the recipe came from a file."""
    return RecipeError(problems_of(error, model, lines), where=where)


def problems_of(error: ValidationError, model: type[BaseModel], lines: Mapping[Path, int] | None = None) -> str:
    """Every problem of a document of any closed schema in one sentence, with its line where that is known."""
    problems = []
    for item in error.errors(include_url=False):
        path = tuple(key for key in item["loc"] if not _is_branch(key))
        if len(path) < len(item["loc"]) and _is_other_branch(item):
            continue
        at = ".".join(map(str, path))
        line = _line_of(path, lines or {})
        text = f"line {line}: {at}" if line else at
        problems.append(f"{text}: {_say(item, path, model)}" if text else _say(item, path, model))
    return problems[0] if len(problems) == 1 else f"{len(problems)} problems: " + "; ".join(problems)


def _is_branch(key: str | int) -> bool:
    """Whether pydantic put this into a path for a side of "a number, or a section"; no key of the file."""
    return isinstance(key, str) and (key == "constrained-float" or key.startswith("function-after["))


def _is_other_branch(item: Any) -> bool:
    """Whether a problem is of the side that was not meant: a section is no number, a number no section."""
    return item["type"] == "model_type" or (item["type"] == "float_type" and isinstance(item["input"], dict))


def _say(item: Any, path: Path, model: type[BaseModel]) -> str:
    kind, seen = item["type"], item["input"]
    if kind == "extra_forbidden":
        section = _section(model, path[:-1])
        return f"unknown key. {nearest(str(path[-1]), section.model_fields)}"
    if kind == "missing":
        return "is missing"
    if kind == "literal_error":
        return f"{seen!r} is not accepted; accepted: {item['ctx']['expected']}"
    if kind == "value_error":
        return str(item["ctx"]["error"])
    return f"{item['msg']} (seen: {seen!r})"


def _section(model: type[BaseModel], path: Path) -> type[BaseModel]:
    for key in path:
        field = model.model_fields.get(str(key))
        annotation = field.annotation if field else None
        model = _model_in(annotation) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section itself, one that may be absent (a union with None), or that of a list or mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _model_in(inner))), None)


def _line_of(path: Path, lines: Mapping[Path, int]) -> int | None:
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None
