"""Text from tokens as they come: whole characters, without stop strings, and in the end all of it.

What has been given out, together, is what the tokenizer makes of all tokens at once (special tokens skipped). So
bytes wait until they are a character or can't become one, with byte fallback a run of bytes waits for its end (one
wrong byte makes every byte of the run U+FFFD), and text waits while it may be the start of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from .vocabulary import Vocabulary


class Decoder(Protocol):
    def push(self, token: int) -> str:
        """Text that is certain now."""

    def flush(self) -> str:
        """The rest."""


class BytesDecoder:
    """Byte-level BPE."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        data = self._tokens[token] if token < len(self._tokens) else b""
        return self._decoder.decode(data) if isinstance(data, bytes) else data

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class PiecesDecoder:
    """Pieces with byte fallback."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens, self._to_strip = vocabulary.tokens, vocabulary.num_stripped
        self._run = b""

    def push(self, token: int) -> str:
        piece = self._tokens[token] if token < len(self._tokens) else b""
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        return self.flush() + self._strip(piece)

    def flush(self) -> str:
        run, self._run = self._run, b""
        try:
            return self._strip(run.decode())
        except UnicodeDecodeError:
            return self._strip("\ufffd" * len(run))

    def _strip(self, text: str) -> str:
        """Without the leading spaces of the answer as a whole."""
        while self._to_strip and text.startswith(" "):
            text = text[1:]
            self._to_strip -= 1
        if text:
            self._to_strip = 0
        return text


class StopStrings:
    """Finds the stop string that is complete first, and holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Text before any stop string. Of strings that end at the same character the longest counts."""
        if not self._stops:
            return text
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.found = min(found)
            text, self._held = self._held[:at], ""
            return text
        keep = max(self._num_started(stop) for stop in self._stops)
        at = len(self._held) - keep
        text, self._held = self._held[:at], self._held[at:]
        return text

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text

    def _num_started(self, stop: str) -> int:
        """Longest end of the held text that the stop string starts with."""
        most = min(len(stop) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)


class Detokenizer:
    """Text of one answer."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str] = ()) -> None:
        self._decoder: Decoder = (
            PiecesDecoder(vocabulary) if vocabulary.has_byte_fallback else BytesDecoder(vocabulary)
        )
        self._stops = StopStrings(stops)

    @property
    def stop(self) -> str | None:
        """The stop string that was found; nothing may be pushed after it."""
        return self._stops.found

    def push(self, token: int) -> str:
        """New text."""
        return self._stops.push(self._decoder.push(token))

    def finish(self) -> str:
        """What was held back; it may still complete a stop string (``stop``)."""
        text = self._stops.push(self._decoder.flush())
        return text if self.stop is not None else text + self._stops.flush()
