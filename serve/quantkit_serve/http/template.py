"""The chat template of a checkpoint: Jinja, in a sandbox, with the names that published templates use.

Source of those names: transformers' chat template documentation (``raise_exception``, ``strftime_now``,
``tojson`` that keeps characters, ``generation`` blocks, trimmed blocks). The template comes with the
checkpoint, what it prints comes from anyone: so it runs without access to Python's objects, and whatever it
raises is the request's error. ``bounded`` keeps it from taking memory or time without end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from quantkit.errors import UnsupportedError

from ..refusal import Refused
from .bounded import BoundedEnvironment


class _Generation(Extension):
    """``{% generation %}`` marks an assistant's text for training; here it only prints it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(style: str) -> str:
    return datetime.now().strftime(style)


def _json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
          separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> BoundedEnvironment:
    found = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    found.filters["tojson"] = _json
    found.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return found


class ChatTemplate:
    """One template.

    Args:
        source: Jinja.
        constants: names that are the same for every chat (``bos_token`` ...).

    Attributes:
        variables: names that it uses; what else is given has no effect.

    Raises:
        UnsupportedError: it isn't valid Jinja.
    """

    def __init__(self, source: str, constants: Mapping[str, str]) -> None:
        self._environment = environment = _environment()
        try:
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UnsupportedError(
                f"the chat template is not valid: {error.message}, line {error.lineno}",
                where="chat_template.jinja",
            ) from None
        self._constants = constants
        self._knows_developers = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a chat. Role ``developer``, OpenAI's newer name, is ``system`` for templates that don't know it.

        Raises:
            Refused: the template can't take these messages, or has no use for the tools or a name of ``more``.
        """
        more = more or {}
        self._check(tools, more)
        if not self._knows_developers:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        try:
            return self._environment.text(
                self._template,
                {
                    **self._constants,
                    **more,
                    "messages": messages,
                    "tools": list(tools) or None,
                    "add_generation_prompt": add_generation_prompt,
                },
            )
        except Exception as error:  # templates are programs: they raise anything
            raise Refused(f"the model's chat template refuses these messages: {error}", param="messages") from None

    def _check(self, tools: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> None:
        if tools and "tools" not in self.variables:
            raise Refused("the chat template of this model has no place for tools", param="tools")
        fixed = {"messages", "tools", "add_generation_prompt", *self._constants}
        for name in more:
            if name in fixed or name not in self.variables:
                param = name if name == "reasoning_effort" else "chat_template_kwargs"
                raise Refused(f"the chat template of this model does not take {name[:80]}", param=param)
