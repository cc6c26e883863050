"""Text to tokens and back, as the checkpoint's own files say.

The ``tokenizers`` library alone reads tokenizer.json; transformers' layer above it would load torch to do the
same. Long texts are tokenized in a thread, one at a time, by the library's calls for batches: these release
Python's lock, which its plain ``encode`` and ``decode`` hold to the end. So they hold up neither other requests
nor the engine's threads. Left out: tokenizers that are Python code of the checkpoint.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from quantkit.errors import ArtifactError

from ..engine.vocabulary import Vocabulary
from ..refusal import Refused
from .template import ChatTemplate

T = TypeVar("T")
INLINE_CHARS = 4096  # some 1 ms; a thread costs a tenth of that
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Tokenizer of one model, with its chat templates.

    Args:
        raw: from tokenizer.json.
        templates: by name; ``default`` and, in older checkpoints, ``tool_use``.
    """

    def __init__(self, raw: tokenizers.Tokenizer, templates: dict[str, ChatTemplate] | None = None) -> None:
        raw.no_padding()
        raw.no_truncation()
        self.raw = raw
        self._templates = templates or {}
        self._special = {i: t.content for i, t in raw.get_added_tokens_decoder().items() if t.special}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """From tokenizer.json, tokenizer_config.json and chat_template.jinja, of which the first is needed.

        Raises:
            ArtifactError: a file is missing or can't be read.
            UnsupportedError: a chat template that isn't valid.
        """
        path = folder / "tokenizer.json"
        try:
            raw = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError(f"can't be read: {error}", where=str(path)) from None
        config = _config(folder / "tokenizer_config.json")
        constants = {name: text for name in SPECIAL if (text := _content(config.get(name))) is not None}
        return cls(raw, {n: ChatTemplate(s, constants) for n, s in _sources(folder, config).items()})

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """
        Raises:
            UnsupportedError: see ``Vocabulary``.
        """
        return Vocabulary.of(self.raw)

    def template(self, *, has_tools: bool = False) -> ChatTemplate:
        """
        Raises:
            Refused: the model has none.
        """
        found = self._templates.get("tool_use") if has_tools else None
        found = found or self._templates.get("default")
        if found is None:
            raise Refused("this model has no chat template; /v1/completions takes plain text", param="messages")
        return found

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self.raw.encode(text, add_special_tokens=add_special_tokens).ids

    async def encoded(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The same without holding up the event loop."""
        if len(text) <= INLINE_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        found = await self.aside(
            partial(self.raw.encode_batch_fast, [text], add_special_tokens=add_special_tokens)
        )
        return found[0].ids

    async def decoded(self, tokens: Sequence[int]) -> str:
        """Text of any tokens, special ones shown."""
        if len(tokens) <= INLINE_CHARS:
            return self.raw.decode(list(tokens), skip_special_tokens=False)
        found = await self.aside(partial(self.raw.decode_batch, [list(tokens)], skip_special_tokens=False))
        return found[0]

    async def aside(self, work: Callable[[], T]) -> T:
        """What takes its time, in the one thread for it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def fewest_tokens(self, text: str) -> int:
        """At least so many: none stands for more characters than the longest, unless text is normalized first."""
        return 0 if self.raw.normalizer is not None else len(text) // self._longest

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.raw.get_vocab(with_added_tokens=True)), default=1)

    def is_special(self, token: int) -> bool:
        return token in self._special

    def token_bytes(self, token: int) -> bytes:
        """What it stands for; a special token's name; empty for an id without a token."""
        if (name := self._special.get(token)) is not None:
            return name.encode()
        tokens = self.vocabulary.tokens
        found = tokens[token] if token < len(tokens) else b""
        return found if isinstance(found, bytes) else found.encode()


def _config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"can't be read: {error}", where=str(path)) from None
    if not isinstance(found, dict):
        raise ArtifactError("is not a JSON object", where=str(path))
    return found


def _content(token: Any) -> str | None:
    """Special tokens are stored as strings or as objects."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files win over tokenizer_config.json, as in transformers."""
    inside = config.get("chat_template")
    found = {"default": inside} if isinstance(inside, str) else {}
    if isinstance(inside, list):
        found = {
            t["name"]: t["template"] for t in inside if isinstance(t, dict) and {"name", "template"} <= set(t)
        }
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in files.items():
        if path.exists():
            try:
                found[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ArtifactError(f"can't be read: {error}", where=str(path)) from None
    return found
