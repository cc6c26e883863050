"""The JSON lines of a task, each checked by itself, so that an error names its line.

What a harness would score in silence is refused: empty continuations, choices that are equal, an answer that is
none of them. An item keeps only what its kind wants.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from quantkit.errors import UsageError

from .schema import FIELD, FIELDS, TaskFile

MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Line:
    """One line of a file.

    Attributes:
        where: file and number, for messages.
        row: its fields.
    """

    where: str
    number: int
    row: dict[str, Any]

    def fail(self, what: str, accepted: str | None = None) -> NoReturn:
        raise UsageError(what, where=self.where, accepted=accepted)

    def field(self, name: str) -> Any:
        if name not in self.row:
            self.fail(f"has no field {name!r}; it has {', '.join(sorted(self.row)) or 'none'}")
        return self.row[name]

    def value(self, source: str) -> Any:
        """Of a field's name, or of a template as text."""
        if "{{" not in source:
            return self.field(source)
        return FIELD.sub(lambda found: self._plain(found[1]), source)

    def text(self, source: str, name: str) -> str:
        """As ``value``, which must be a text and not empty."""
        value = self.value(source)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            self.fail(f"{name} is {_short(value)}", "a text")
        text = str(value)
        if not text.strip():
            self.fail(f"{name} is empty: there is nothing to score" if name != "context" else "context is empty")
        return text

    def _plain(self, name: str) -> str:
        value = self.field(name)
        if isinstance(value, dict | list) or value is None:
            self.fail(f"{name} is {_short(value)} and is used in a template", "a text or a number")
        return str(value)


def read_items(path: Path, data: bytes, task: TaskFile) -> tuple[dict[str, Any], ...]:
    """All items, each a mapping with ``id``, ``cluster``, and the fields of the task's kind.

    Args:
        path: for messages.
        data: of the file.

    Raises:
        UsageError: not UTF-8, a line that is no JSON object, a field that is missing or of another type, nothing
            to score, choices that can't be chosen from, an id that is there twice, no items.
    """
    found: dict[str, dict[str, Any]] = {}
    lines: dict[str, int] = {}
    for line in _lines(path, data):
        item = _item(line, task)
        if item["id"] in found:
            line.fail(
                f"the id {_short(item['id'])} is that of line {lines[item['id']]}, too", "ids that are unique"
            )
        found[item["id"]], lines[item["id"]] = item, line.number
    if not found:
        raise UsageError("the task has no items", where=str(path), accepted="one JSON object a line")
    return tuple(found.values())


def _lines(path: Path, data: bytes) -> Iterator[Line]:
    data = data.removeprefix(b"\xef\xbb\xbf")
    for number, raw in enumerate(data.split(b"\n"), 1):
        where = f"{path}:{number}"
        try:
            text = raw.decode("utf-8").strip()
            if not text:
                continue
            row = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"not UTF-8 text: byte 0x{raw[error.start]:02x}", where=where) from None
        except UnicodeEncodeError:
            raise UsageError("half of a surrogate pair, which is no text", where=where) from None
        except json.JSONDecodeError as error:
            raise UsageError(f"not JSON: {error.msg} at column {error.colno}", where=where) from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"not JSON: {error}", where=where) from None
        line = Line(where, number, row)
        if not isinstance(row, dict):
            line.fail(f"is {_short(row)}", "a JSON object")
        yield line


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _item(line: Line, task: TaskFile) -> dict[str, Any]:
    number = str(line.number)
    name = _label(line, task.id, "id", number)
    item = {"id": name, "cluster": _label(line, task.cluster, "cluster", name)}
    if task.kind == "choice":
        return item | _choice(line, task)
    if task.kind == "generate":
        return item | _generate(line, task)
    return item | {field: line.text(task.source(field), field) for field in FIELDS[task.kind]}


def _label(line: Line, source: str | None, name: str, default: str) -> str:
    if source is None and name not in line.row:
        return default
    value = line.value(source or name)
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        line.fail(f"{source or name} is {_short(value)}", "a text or a whole number")
    return str(value)


def _choice(line: Line, task: TaskFile) -> dict[str, Any]:
    if isinstance(task.choices, list):
        choices = [line.text(source, "choices") for source in task.choices]
    else:
        value = line.value(task.source("choices"))
        if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
            line.fail(f"choices is {_short(value)}", "a list of texts")
        choices = value
    if len(choices) < 2:
        line.fail(f"there is a choice of {len(choices)}", "two or more")
    if not all(choice.strip() for choice in choices):
        line.fail("a choice is empty: there is nothing to score")
    if len(set(choices)) < len(choices):
        line.fail("two choices are equal")
    answer = line.value(task.source("answer"))
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        line.fail(f"answer is {_short(answer)}", f"0 to {len(choices) - 1}, or the text of a choice")
    return {"context": line.text(task.source("context"), "context"), "choices": choices, "answer": answer}


def _generate(line: Line, task: TaskFile) -> dict[str, Any]:
    schema = line.row.get("json_schema", task.json_schema)
    item: dict[str, Any] = {"prompt": line.text(task.source("prompt"), "prompt")}
    if schema is not None:
        if not isinstance(schema, dict):
            line.fail(f"json_schema is {_short(schema)}", "a JSON Schema, an object")
        item["json_schema"] = schema
    source = task.source("target")
    if task.target is not None or source in line.row:
        value = line.value(source)
        is_json = schema is not None and not isinstance(value, str)
        item["target"] = value if is_json else line.text(source, "target")
    elif schema is None:
        line.fail("has neither a target nor a json_schema: there is nothing to judge an answer by")
    return item


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
