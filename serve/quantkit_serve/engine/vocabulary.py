"""What each token stands for: bytes, or a piece of text, without running the tokenizer.

Two kinds of ``tokenizer.json`` exist among the models served: byte-level BPE, whose tokens are bytes spelled in
printable characters (GPT-2's table), and pieces with byte fallback (Llama's), whose tokens are text except those
named ``<0x00>`` to ``<0xFF>``. Other decoders are refused: a wrong guess would garble text silently.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.errors import UnsupportedError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id.

    Attributes:
        tokens: bytes (byte-level BPE, or a byte of a byte fallback) or text; ids without a token, and special
            tokens, which don't show in answers, are empty bytes.
        has_byte_fallback: single bytes are text only together with the ones next to them.
        num_stripped: spaces that the start of an answer loses.
    """

    tokens: tuple[bytes | str, ...]
    has_byte_fallback: bool = False
    num_stripped: int = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """
        Raises:
            UnsupportedError: its decoder is of neither kind.
        """
        steps = _steps(None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__()))
        special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        names = {i: name for name, i in tokenizer.get_vocab(with_added_tokens=True).items() if i not in special}
        ids = range(max(names, default=-1) + 1)
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(tuple(_spelled(names[i]) if i in names else b"" for i in ids))
        if not _has_byte_fallback(steps):
            raise UnsupportedError(
                f"the decoder is {', then '.join(kinds) or 'missing'}",
                where="tokenizer.json",
                accepted="ByteLevel; or Replace of strings, ByteFallback, Fuse, and Strip of leading spaces",
            )
        replaced = [(s["pattern"]["String"], s["content"]) for s in steps if s["type"] == "Replace"]
        return cls(
            tuple(_piece(names[i], replaced) if i in names else b"" for i in ids),
            has_byte_fallback=True,
            num_stripped=steps[-1].get("start", 0),
        )


def _has_byte_fallback(steps: list[dict[str, Any]]) -> bool:
    rest = list(steps)
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        del rest[0]
    if rest and rest[-1]["type"] == "Strip" and rest[-1]["content"] == " " and not rest[-1]["stop"]:
        del rest[-1]
    return [step["type"] for step in rest] == ["ByteFallback", "Fuse"]


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: printable bytes of Latin-1 stand for themselves, the others for what follows U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_characters()


def _spelled(name: str) -> bytes:
    """A name with a character outside the table (an added token) is plain text."""
    try:
        return bytes(_BYTE_OF[c] for c in name)
    except KeyError:
        return name.encode()


def _piece(name: str, replaced: list[tuple[str, str]]) -> bytes | str:
    for pattern, content in replaced:
        name = name.replace(pattern, content)
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            return name
    return name
