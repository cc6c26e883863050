"""The tokenizer of a checkpoint, read without transformers, against transformers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Coroutine
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import ArtifactError, UnsupportedError
from quantkit_serve.http import logprobs
from quantkit_serve.http.tokenizer import INLINE_CHARS, Tokenizer
from quantkit_serve.http.tokens import INLINE_TOKENS
from quantkit_serve.refusal import Refused
from quantkit_serve.request import TokenLogprob

from .conftest import Client
from .fakes import MODEL, bundled

TEXTS = ["", " a", "Grüße – 你好 🎉", "<|user|>\n[gMASK]", "\x00\x7f\t\n", "a\u0301" * 50]


@cache
def transformers_own() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_as_transformers_has_them(text: str) -> None:
    other = transformers_own()
    for special in (False, True):
        assert bundled().encode(text, add_special_tokens=special) == other.encode(text, add_special_tokens=special)
    messages = [{"role": "user", "content": text}]
    rendered = other.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert bundled().template().render(messages) == rendered


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_are_those_of_the_text(text: str) -> None:
    tokens = bundled().encode(text, add_special_tokens=False)
    assert b"".join(map(bundled().token_bytes, tokens)) == text.encode()
    assert bundled().fewest_tokens(text) <= len(tokens)
    assert bundled().token_bytes(10**6) == b""


def test_long_texts_leave_python_to_others() -> None:
    """A call that holds Python's lock to its end lets another thread run a few times before it at most."""
    tokenizer, text = bundled(), "in the beginning, " * 40_000

    async def turns(work: Coroutine[Any, Any, Any]) -> tuple[Any, int]:
        task, count = asyncio.create_task(work), 0
        while not task.done():
            await asyncio.sleep(0.001)
            count += 1
        return task.result(), count

    tokens, count = asyncio.run(turns(tokenizer.encoded(text, add_special_tokens=True)))
    assert count > 20 and tokens == tokenizer.encode(text, add_special_tokens=True)
    assert len(tokens) > INLINE_CHARS and asyncio.run(tokenizer.decoded(tokens)) == text


def copied(folder: Path, config: dict[str, Any] | None = None, *files: str) -> Path:
    shutil.copy(MODEL / "tokenizer.json", folder)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_without_a_template_chat_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(copied(tmp_path))
    with pytest.raises(Refused, match="/v1/completions"):
        tokenizer.template()


@pytest.mark.parametrize(
    ("template", "chat", "tools"),
    [
        ("plain {{ bos_token }}", "plain <b>", "plain <b>"),
        ([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}], "d", "t"),
    ],
    ids=["text", "named"],
)
def test_templates_of_older_checkpoints(tmp_path: Path, template: Any, chat: str, tools: str) -> None:
    config = {"chat_template": template, "bos_token": {"content": "<b>", "special": True}, "eos_token": None}
    tokenizer = Tokenizer.load(copied(tmp_path, config))
    assert tokenizer.template().render([]) == chat
    assert tokenizer.template(has_tools=True).render([]) == tools
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(tmp_path).template().render([]) == "file"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ArtifactError):
        Tokenizer.load(tmp_path)
    copied(tmp_path, {"chat_template": "{% for %}"})
    with pytest.raises(UnsupportedError):
        Tokenizer.load(tmp_path)
    for content in ("[]", "{"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ArtifactError, match="tokenizer_config"):
            Tokenizer.load(tmp_path)


def test_offsets_of_special_tokens() -> None:
    """One that the tokenizer added takes no room in the text, one that the text names does."""
    tokenizer = bundled()
    start = next(t for t in range(10) if tokenizer.token_bytes(t) == b"<sop>")
    tokens = [start, *tokenizer.encode("a<sop>–b", add_special_tokens=False)]
    offsets = logprobs.Offsets(tokenizer.token_bytes, tokenizer.is_special)
    assert offsets.of(tokens, "a<sop>–b") == [0, 0, 1, 6, 6, 6, 7]
    assert offsets.at == 8
    assert offsets.of([start, tokens[1], tokens[1]]) == [8, 8, 9]


def test_infinite_logprobs_are_numbers() -> None:
    token = TokenLogprob(5, float("-inf"), 9, ((6, -0.5), (7, float("-inf"))))
    assert logprobs.chat([token], bundled().token_bytes)["content"][0]["logprob"] == -9999
    found = logprobs.completion([5], [token], [0], bundled().token_bytes)
    assert found["token_logprobs"] == [-9999] and sorted((found["top_logprobs"][0] or {}).values()) == [
        -9999, -9999, -0.5,
    ]  # fmt: skip


def test_a_long_reply_of_tokenize_says_the_same(client: Client) -> None:
    def tokens(times: int) -> dict[str, Any]:
        found: dict[str, Any] = client.post(
            "/tokenize", {"prompt": "\n7" * times, "return_token_strs": True, "add_special_tokens": False}
        ).json()
        return found

    one, many = tokens(1), tokens(5000)
    assert many["count"] == len(many["tokens"]) == 5000 * one["count"] > INLINE_TOKENS
    assert many["tokens"] == one["tokens"] * 5000 and many["token_strs"] == one["token_strs"] * 5000
