"""What the answer must be: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and its older ``guided_*``.

All are enforced. ``strict: false`` allows less than that, which is no reason to do less.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from ...refusal import Refused
from ...request import Grammar
from .fields import Body, Only

Schema = dict[str, Any]


class NamedSchema(Body):
    name: str
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """vLLM's; one of the first four."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    json_object: bool | None = None
    grammar: Annotated[None, Only()] = None
    structural_tag: Annotated[None, Only()] = None
    disable_any_whitespace: Annotated[bool, Only(False)] = False
    disable_additional_properties: Annotated[bool, Only(False)] = False
    whitespace_pattern: Annotated[None, Only()] = None


class OutputFields(Body):
    """Fields that chat and completions share."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: Annotated[None, Only()] = None
    guided_decoding_backend: Annotated[None, Only()] = None
    guided_whitespace_pattern: Annotated[None, Only()] = None

    def grammar(self) -> Grammar | None:
        """
        Raises:
            Refused: more than one is asked for.
        """
        found = {name: grammar for name, grammar in self._grammars().items() if grammar is not None}
        if len(found) > 1:
            names = " and ".join(found)
            raise Refused(f"only one of {names} can be enforced", param=next(iter(found)))
        return next((replace(grammar, param=name) for name, grammar in found.items()), None)

    def _grammars(self) -> dict[str, Grammar | None]:
        asked = self.structured_outputs or StructuredOutputs()
        return {
            "response_format": _response(self.response_format),
            "structured_outputs.json": _schema(asked.json_),
            "structured_outputs.regex": _regex(asked.regex),
            "structured_outputs.choice": _choice(asked.choice),
            "structured_outputs.json_object": Grammar("json_object") if asked.json_object else None,
            "guided_json": _schema(self.guided_json),
            "guided_regex": _regex(self.guided_regex),
            "guided_choice": _choice(self.guided_choice),
        }


def _response(wanted: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> Grammar | None:
    if isinstance(wanted, JsonSchemaFormat):
        return _schema(wanted.json_schema.schema_)
    return Grammar("json_object") if isinstance(wanted, JsonObjectFormat) else None


def _schema(schema: Schema | str | None) -> Grammar | None:
    if schema is None:
        return None
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False))


def _regex(source: str | None) -> Grammar | None:
    return None if source is None else Grammar("regex", source)


def _choice(choices: list[str] | None) -> Grammar | None:
    return None if choices is None else _regex("|".join(f"(?:{_literal(choice)})" for choice in choices))


def _literal(text: str) -> str:
    """As a regular expression of Rust's kind, which knows no needless escapes of letters."""
    return "".join("\\" + c if c in r"\.+*?()|[]{}^$#&-~/" else c for c in text)
