"""Answers that follow a grammar: which tokens may come next, from llguidance.

A grammar is compiled once per request, outside of the engine's thread and before the request is taken, so that
one that is invalid, unsupported or too large is refused and not discovered in the middle of an answer. A matcher
belongs to the request, not to its pages: a preemption does not touch it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..refusal import Refused
from ..request import Grammar

MAX_SOURCE_CHARS = 1 << 16
MAX_DEPTH = 120  # of brackets; llguidance reads no more than 128
LEXER_FUEL = (
    200_000  # work on regular expressions at first; monsters like (a{1000}){1000} take seconds with a million
)
JSON_OPTIONS = {
    # Models like to repeat white space, which JSON allows anywhere, until max_tokens.
    "whitespace_pattern": r"[ \n\r\t]{0,32}",
    "lenient": False,  # a schema may ask for it, and what it says would then be ignored in part
}


class GrammarFailed(Exception):
    """A grammar that can't go on; the request ends."""


class Matcher:
    """Where an answer is in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._bits = np.zeros((1, -(-vocab_size // 32)), np.int32)

    def allowed(self) -> NDArray[np.bool_]:
        """bool ``[V]``: tokens that may come next.

        Raises:
            GrammarFailed: the parser gave up.
        """
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._bits)
        self._raise_if_failed()
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocab_size]
        result: NDArray[np.bool_] = bits.view(np.bool_)
        return result

    def accept(self, token: int) -> None:
        """Go on with this token.

        Raises:
            GrammarFailed: it isn't allowed, or the parser gave up.
        """
        if not self._matcher.consume_token(token):
            self._raise_if_failed()
            raise GrammarFailed(f"token {token} does not follow the grammar")

    @property
    def is_complete(self) -> bool:
        """Nothing can follow but the end."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def _raise_if_failed(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(f"the grammar can't go on: {_reason(self._matcher.get_error())}")


class Compiler:
    """Makes matchers for the answers of one model; callable from any thread.

    Args:
        tokenizer: ``tokenizer.json`` as text, with all added tokens.
        vocab_size: columns of the logits.
        eos: tokens that end an answer.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos)
        self._lock = threading.Lock()
        self._ready: Any = None

    def compile(self, grammar: Grammar) -> Matcher:
        """
        Raises:
            Refused: invalid, unsupported or too large.
        """
        from llguidance import LLMatcher, LLParserLimits

        source = self._source(grammar, LLMatcher)
        limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL, verbose_errors=False)
        matcher = LLMatcher(self._llguidance(), source, log_level=0, limits=limits)
        if matcher.is_error():
            raise Refused(f"{grammar.kind}: {_reason(matcher.get_error())}", param=grammar.param)
        made = Matcher(matcher, self._vocab_size)
        try:
            is_possible = made.allowed().any()
        except GrammarFailed as failed:
            raise Refused(f"{grammar.kind}: {failed}", param=grammar.param) from None
        if not is_possible:
            raise Refused(f"{grammar.kind}: nothing can follow it", param=grammar.param)
        return made

    def _source(self, grammar: Grammar, matcher: Any) -> str:
        if len(grammar.source) > MAX_SOURCE_CHARS:
            raise Refused(
                f"{grammar.kind} has {len(grammar.source)} characters; at most {MAX_SOURCE_CHARS} are accepted",
                param=grammar.param,
            )
        try:
            if grammar.kind == "regex":
                return str(matcher.grammar_from_regex(grammar.source))
            schema = {"type": "object"} if grammar.kind == "json_object" else _schema(grammar)
            return str(matcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS))
        except ValueError as error:
            raise Refused(f"{grammar.kind}: {_reason(str(error))}", param=grammar.param) from None

    def _llguidance(self) -> Any:
        """Made at the first grammar: it takes a second for a large vocabulary, and most servers never need it."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._ready is None:
                self._ready = LLTokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos)
            return self._ready


def _schema(grammar: Grammar) -> dict[str, Any]:
    source, param = grammar.source, grammar.param
    if (depth := _depth(source)) > MAX_DEPTH:
        raise Refused(f"json_schema is nested {depth} deep; at most {MAX_DEPTH} is accepted", param=param)
    try:
        schema = json.loads(source)
    except ValueError as error:
        raise Refused(f"json_schema is not JSON: {error}", param=param) from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        given = "false, which allows nothing" if schema is False else type(schema).__name__
        raise Refused(f"json_schema must be an object or true, got {given}", param=param)
    return schema


def _depth(source: str) -> int:
    """Of brackets; those within strings count too, which is only too strict by what nobody writes."""
    depth = deepest = 0
    for character in source:
        if character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def _reason(message: str) -> str:
    """llguidance's message in one line: the first, and what a parser of regular expressions says below its drawing
    of the place."""
    first, *more = message.strip().split("\n")
    causes = [line.removeprefix("error: ") for line in more if line.startswith("error: ")]
    return " ".join([first, *causes])
