"""What an answer is asked for with: lm-eval's ``gen_kwargs``, understood in full or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import UsageError

DEFAULT_TOKENS = 256  # as lm-eval's
_MOST = 2**31 - 1  # of any number: what is more is a mistake
_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first one counts
_NUMBERS = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_KNOWN = ("until", "do_sample", "json_schema", "top_k", *_MAX_TOKENS, *_NUMBERS)


@dataclass(frozen=True, slots=True)
class Generation:
    """How an answer is made.

    Attributes:
        max_tokens: of the answer.
        stop: strings that end it, and are left out of it; the model's own end tokens do in any case.
        temperature: 0 is greedy.
        json_schema: the answer's, as text, for candidates that can enforce one; empty: none.
    """

    max_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    json_schema: str = ""

    @property
    def is_sampled(self) -> bool:
        return self.temperature > 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """An answer that is wanted.

    Attributes:
        text: of the prompt, chat template applied.
        tokens: of it.
        generation: how.
        seed: of a sampled answer.
        arguments: what ``generation`` was made of.
    """

    text: str
    tokens: tuple[int, ...]
    generation: Generation
    seed: int
    arguments: Mapping[str, Any]


def parse_generation(arguments: Mapping[str, Any], where: str) -> Generation:
    """lm-eval's arguments: greedy unless ``do_sample`` or a temperature says otherwise, as its ``hf`` model does.

    Raises:
        UsageError: an argument that is unknown here, or has a value that makes no sense.
    """
    for name in arguments:
        if name not in _KNOWN:
            raise UsageError(
                f"the generation argument {name!r} is not supported", where=where, accepted=", ".join(_KNOWN)
            )
    given = [_whole(arguments, name, 1, where) for name in _MAX_TOKENS if arguments.get(name) is not None]
    max_tokens = given[0] if given else DEFAULT_TOKENS
    numbers: dict[str, Any] = {"top_k": 0}
    if arguments.get("top_k") is not None:
        numbers["top_k"] = _whole(arguments, "top_k", 0, where)
    for name, default in _NUMBERS.items():
        numbers[name] = _number(arguments.get(name, default), name, where)
    if not isinstance(arguments.get("do_sample"), bool | None):
        raise UsageError(f"do_sample is {arguments['do_sample']!r}", where=where, accepted="true or false")
    if arguments.get("do_sample") is False:
        numbers["temperature"] = 0.0
    elif arguments.get("do_sample") is True and "temperature" not in arguments:
        numbers["temperature"] = 1.0
    schema = arguments.get("json_schema") or ""
    text = schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)
    return Generation(max_tokens, _stops(arguments.get("until"), where), json_schema=text, **numbers)


def _whole(arguments: Mapping[str, Any], name: str, least: int, where: str) -> int:
    value = arguments[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise UsageError(f"{name} is {value!r:.60}", where=where, accepted=f"a whole number from {least}")
    return value


def _number(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
        raise UsageError(f"{name} is {value!r:.60}", where=where, accepted="a number, 0 or more")
    return float(value)


def _stops(until: Any, where: str) -> tuple[str, ...]:
    found = [] if until is None else [until] if isinstance(until, str) else until
    if not isinstance(found, list | tuple) or not all(isinstance(stop, str) for stop in found):
        raise UsageError(f"until is {until!r}", where=where, accepted="a string or a list of strings")
    return tuple(stop for stop in found if stop)
