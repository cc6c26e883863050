"""Types of fields, with one clear error each where a union of types would give one for every member."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic import WithJsonSchema as Shown
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_PROMPTS = 1024


def wrong(message: str) -> PydanticCustomError:
    """Braces would be taken for placeholders."""
    return PydanticCustomError("value", "{message}", {"message": message})


class Body(BaseModel):
    """Closed: an unknown field is an error, and no type is converted into another."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Only:
    """Annotation of a field that other servers have and this one doesn't: only a value that asks for nothing.

    ``beam: Annotated[bool, Only(False)] = False``
    """

    value: Any = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [self.value] if self.value is None else [self.value, None]}

    def _check(self, value: Any) -> Any:
        is_same = value == self.value and isinstance(value, bool) == isinstance(self.value, bool)
        if value is None or is_same:
            return value
        raise wrong(f"this is not supported by this server; leave it out (or send {json.dumps(self.value)})")


def _strings(value: Any) -> Any:
    found = [value] if isinstance(value, str) else value
    if found is not None and not (isinstance(found, list) and all(isinstance(s, str) for s in found)):
        raise wrong("must be a string or a list of strings")
    return found


Strings = Annotated[
    list[str] | None,
    BeforeValidator(_strings),
    Shown({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]

Prompt = str | list[int]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _prompts(value: Any) -> list[Prompt]:
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(p, str) or _is_ids(p) for p in value):
        if len(value) > MAX_PROMPTS:
            raise wrong(f"has {len(value)} prompts; at most {MAX_PROMPTS} are accepted")
        return value
    raise wrong(
        "must be a text, a list of texts, a list of token ids, or a list of such lists; none of them empty"
    )


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Prompts = Annotated[
    Any,  # list[Prompt]: a member-wise check of a million ids would be the third
    BeforeValidator(_prompts),
    Shown(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]

Count = Annotated[int, Field(ge=0)]
