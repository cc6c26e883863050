"""The sandbox that chat templates run in: jinja2's, in which nothing takes memory or time without end.

A template comes with its checkpoint, and checkpoints come from anyone: ``{{ "a" * 10**10 }}`` must not take a
server down. jinja2's sandbox keeps Python's objects away and bounds ``range``; here

- text and lists made by ``+``, ``~``, ``*``, ``%``, ``replace``, ``join``, ``format`` are at most ``MAX_CHARS``
  long, looked at before they are made, and so is what is printed;
- powers and products of numbers have at most ``MAX_BITS`` bits, numbers given to methods of texts and to filters
  are at most ``MAX_NUMBER``;
- every turn of a loop and every call of a macro looks at the clock: ``MAX_S`` seconds in all.

Left out: memory of many texts that are each within the limit, and the time of a single operation on such. Only a
process of its own could bound these.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARS = 16 << 20  # more than any model's context
MAX_BITS = 4096
MAX_NUMBER = 100_000  # as jinja2 has it for ``range``
MAX_S = 5.0
_WIDTH = re.compile(r"\d{6,}|\*")  # in a format: padding


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """See the module; what goes beyond a limit raises jinja2.TemplateError."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._end = threading.local()
        self.filters = {name: _bounded(name, kind) for name, kind in self.filters.items()}

    def text(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """What a template of this environment prints."""
        parts, size = [], 0
        with self._clock():
            for part in template.generate(variables):
                parts.append(part)
                size += len(part)
                _check(size, MAX_CHARS, "prints", "characters")
        return "".join(parts)

    @contextmanager
    def _clock(self) -> Iterator[None]:
        self._end.at_s = time.monotonic() + MAX_S
        try:
            yield
        finally:
            del self._end.at_s

    def tick(self) -> None:
        """Called by every loop and macro (``_Bounds``)."""
        if time.monotonic() > getattr(self._end, "at_s", float("inf")):
            raise jinja2.TemplateError(f"it takes more than {MAX_S:g} s")

    def joined(self, *parts: Any) -> str:
        """What ``~`` does."""
        texts = [str(part) for part in parts]
        _check(sum(map(len, texts)), MAX_CHARS, "makes a text of", "characters")
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_use(getattr(__obj, "__name__", ""), (owner, *args), kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        found: nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        return found


class _Bounds(NodeTransformer):
    """Puts the calls of ``tick`` and ``joined`` into a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._ticking(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)

    def _ticking(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [], node.lineno), lineno=node.lineno))
        return node


def _call(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=line), args, [], None, None, lineno=line)


def _bounded(name: str, kind: Callable[..., Any]) -> Callable[..., Any]:
    """A filter."""
    first = 1 if hasattr(kind, "jinja_pass_arg") else 0  # its context comes first

    @wraps(kind)
    def found(*args: Any, **kwargs: Any) -> Any:
        _check_use(name, args[first:], kwargs)
        return kind(*args, **kwargs)

    return found


def _check(size: int, most: int, does: str, unit: str) -> None:
    if size > most:
        raise jinja2.TemplateError(f"it {does} more than {most} {unit}")


def _check_binop(operator: str, left: Any, right: Any) -> None:
    if operator == "%":
        if isinstance(left, str):
            _check_style(left)
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            _check(left.bit_length() * abs(right), MAX_BITS, "computes a number of", "bits")
    elif isinstance(left, int) and isinstance(right, int):
        size = left.bit_length() + right.bit_length() if operator == "*" else 0
        _check(size, MAX_BITS, "computes a number of", "bits")
    elif operator == "+":
        if hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check(len(left) + len(right), MAX_CHARS, "makes a text of", "characters")
    else:
        times, many = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(times, int) and hasattr(many, "__len__"):
            _check(len(many) * times, MAX_CHARS, "makes a text of", "characters")


def _check_use(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Of a method of a text, or of a filter; the text is the first argument."""
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, int):
            _check(value, MAX_NUMBER, f"gives {name} a number of", "")
    texts = [*map(str, args[:1]), *map(str, (*args[1:], *kwargs.values()))] if name == "replace" else []
    if name in ("format", "format_map") and args:
        _check_style(str(args[0]))
    elif len(texts) > 2:
        text, old, new = texts[:3]
        _check(len(text) + text.count(old) * len(new), MAX_CHARS, "makes a text of", "characters")
    elif name == "join":
        _check_join(args, kwargs)


def _check_join(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """``', '.join(items)`` or ``items | join(', ')``: the separator is the shorter of what they are given."""
    sizes = [len(value) for value in (*args, *kwargs.values()) if hasattr(value, "__len__")]
    if len(sizes) > 1:
        _check(sizes[0] * sizes[1], MAX_CHARS, "makes a text of", "characters")


def _check_style(style: str) -> None:
    if _WIDTH.search(style):
        raise jinja2.TemplateError(f"it pads to a width that is not written out, or above {MAX_NUMBER}")
