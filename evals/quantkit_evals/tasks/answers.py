"""Metrics of an answer that was generated: equal to the target, valid by its schema, right in how many fields.

An answer that should be JSON must be one JSON value and nothing else, white space apart: that is how a program
would parse it. ``jsonschema_rs`` judges validity, also where the candidate had the schema enforced: enforcement
is part of what is tested, and an answer that was cut off at its length is not valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quantkit.errors import UsageError

from ..extras import require


def score(item: Mapping[str, Any], answer: str) -> dict[str, float]:
    """Every metric that the item allows; the target of one with a schema is a JSON value (``json_target``).

    ``exact_match``: the answer is the target (as JSON values, if it should be JSON). ``valid``: it is JSON that
    follows the schema. ``field_match``: share of the target's fields, at any depth, that the answer has, too.
    """
    found: dict[str, float] = {}
    is_json = "json_schema" in item
    value = _parse(answer) if is_json else answer.strip()
    if "target" in item:
        target = item["target"] if is_json else item["target"].strip()
        found["exact_match"] = float(_equal(value, target))
        if is_json and isinstance(target, dict) and target:
            wanted = _leaves(target)
            given = _leaves(value) if isinstance(value, dict) else {}
            right = sum(path in given and _equal(given[path], leaf) for path, leaf in wanted.items())
            found["field_match"] = right / len(wanted)
    if is_json:
        found["valid"] = float(value is not _NOTHING and validator(item["json_schema"]).is_valid(value))
    return found


def metrics_of(item: Mapping[str, Any]) -> list[str]:
    """Which metrics ``score`` gives for an item, main one first."""
    has_fields = "json_schema" in item and isinstance(item.get("target"), dict) and bool(item["target"])
    return [
        *(["valid"] if "json_schema" in item else []),
        *(["exact_match"] if "target" in item else []),
        *(["field_match"] if has_fields else []),
    ]


def json_target(target: Any, schema: Any) -> Any:
    """A target as the JSON value that the schema's ``validator`` wants: a text is that text where it may be one,
    else what it says as JSON.

    Raises:
        ValueError: neither follows the schema.
    """
    if schema.is_valid(target):
        return target
    value = _parse(target) if isinstance(target, str) else _NOTHING
    if value is _NOTHING or not schema.is_valid(value):
        raise ValueError("the target does not follow the item's own schema")
    return value


def validator(schema: Mapping[str, Any], where: str = "json_schema") -> Any:
    """Of a JSON Schema (draft 2020-12 unless it says otherwise); never fetches a reference.

    Raises:
        UsageError: it is no schema, or refers to another document.
    """
    rs = require("jsonschema_rs")
    try:
        return rs.validator_for(dict(schema), retriever=_refuse)
    except (rs.ValidationError, ValueError) as error:
        raise UsageError(f"is no JSON Schema: {str(error).splitlines()[0]}", where=where) from None


_NOTHING = object()


def _refuse(uri: str) -> Any:
    raise ValueError(f"refers to {uri}, which is not fetched")


def _parse(text: str) -> Any:
    """A JSON value; Python reads more than that: NaN, halves of surrogate pairs, numbers beyond any float."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # UnicodeEncodeError is a ValueError
        return _NOTHING
    return value


def _equal(one: Any, other: Any) -> bool:
    """As JSON: true is not 1, 1.0 is 1."""
    if isinstance(one, bool) != isinstance(other, bool):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _leaves(value: dict[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for key, inner in value.items():
        here = (*path, key)
        found |= _leaves(inner, here) if isinstance(inner, dict) and inner else {here: inner}
    return found
