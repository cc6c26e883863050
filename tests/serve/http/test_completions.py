"""Text completions: kinds of prompts, and scoring them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Client
from .fakes import CONTEXT, SCRIPT, FakeService

PATH = "/v1/completions"


def test_a_whole_reply(client: Client, service: FakeService) -> None:
    got = client.post(PATH, {"prompt": "To the", "max_tokens": 100}).json()
    assert got["object"] == "text_completion" and got["id"].startswith("cmpl-")
    assert got["choices"] == [
        {"index": 0, "text": SCRIPT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert list(service.requests[0].prompt) == service.tokenizer.encode("To the", add_special_tokens=True)


def test_sixteen_tokens_if_nothing_is_said(client: Client, service: FakeService) -> None:
    assert client.post(PATH, {"prompt": "To"}).json()["choices"][0]["finish_reason"] == "length"
    assert service.requests[0].params.max_tokens == 16
    client.post(PATH, {"prompt": [5] * (CONTEXT - 3)})
    assert service.requests[1].params.max_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [None]),
        (["ab", "c"], [None, None]),
        ([5, 6], [(5, 6)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
        (["ab", [7]], [None, (7,)]),
    ],
    ids=str,
)
def test_four_kinds_of_prompts(client: Client, service: FakeService, prompt: Any, tokens: list[Any]) -> None:
    got = client.post(PATH, {"prompt": prompt, "max_tokens": 1, "n": 2}).json()
    assert [c["index"] for c in got["choices"]] == list(range(2 * len(tokens)))
    asked = sorted(service.requests, key=lambda r: int(r.request_id.rpartition("-")[2]))
    for request, expected in zip(asked, [t for t in tokens for _ in range(2)], strict=True):
        assert expected is None or request.prompt == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_scoring_as_lm_eval_does(client: Client, service: FakeService, max_tokens: int, stream: bool) -> None:
    """Every token of prompt and answer, the first without a logprob; offsets are into the text."""
    prompt = service.tokenizer.encode("Über den Fluss – hin", add_special_tokens=False)
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
    if stream:
        chunks = [c["choices"][0] for c in client.events(PATH, {**body, "stream": True})[:-1]]
        text = "".join(c["text"] for c in chunks)
        parts = [c["logprobs"] for c in chunks if c["logprobs"]]
        found = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        assert [c["finish_reason"] for c in chunks][-1] == "length"
    else:
        choice = client.post(PATH, body).json()["choices"][0]
        text, found = choice["text"], choice["logprobs"]
    assert set(found) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    tokens = prompt + service.script[:max_tokens]
    assert text.startswith("Über den Fluss – hin")
    expected = [None, *(-0.25 * (i + 1) for i in range(1, len(prompt)))]
    expected += [-0.25 * (i + 1) for i in range(max_tokens)]
    assert found["token_logprobs"] == expected
    assert found["top_logprobs"][0] is None and all(len(t) == 2 for t in found["top_logprobs"][1:])
    for at, (name, offset) in enumerate(zip(found["tokens"], found["text_offset"], strict=True)):
        data = service.tokenizer.token_bytes(tokens[at])
        if name.startswith("bytes:"):
            assert name == "bytes:" + "".join(f"\\x{b:02x}" for b in data)
        else:
            assert text[offset : offset + len(name)] == name == data.decode()


def test_the_greedy_token_is_the_likeliest_of_its_top(client: Client) -> None:
    """lm-eval compares names: two pieces of characters must not have the same."""
    body = {"prompt": "–", "echo": True, "logprobs": 5, "max_tokens": 0, "add_special_tokens": False}
    found = client.post(PATH, body).json()["choices"][0]["logprobs"]
    assert len(set(found["tokens"])) == 3
    for name, top in list(zip(found["tokens"], found["top_logprobs"], strict=True))[1:]:
        assert max(top, key=top.get) == name


def test_echo_of_text_is_the_text_itself(client: Client) -> None:
    got = client.post(PATH, {"prompt": ["  a\u0301 <|user|>", "x"], "echo": True, "max_tokens": 1}).json()
    assert [c["text"] for c in got["choices"]] == ["  a\u0301 <|user|>The", "xThe"]


def test_chunks(client: Client, service: FakeService) -> None:
    body = {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 100}
    *chunks, last, done = client.events(PATH, body)
    assert done == "[DONE]" and last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2 * len(service.script)
    assert {c["object"] for c in chunks} == {"text_completion"}
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["text"] for c in mine) == SCRIPT
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]


@pytest.mark.parametrize(
    ("length", "max_tokens", "ok"),
    [
        (CONTEXT - 1, 1, True), (CONTEXT - 1, 2, False), (CONTEXT - 1, None, True), (CONTEXT, 1, False),
        (CONTEXT, None, False), (CONTEXT, 0, True), (CONTEXT + 1, 0, False),
    ],
)  # fmt: skip
def test_the_edge_of_the_context(client: Client, length: int, max_tokens: int | None, ok: bool) -> None:
    got = client.post(PATH, {"prompt": [5] * length, "max_tokens": max_tokens, "echo": max_tokens == 0})
    assert (got.status_code == 200) is ok, got.text
    if not ok:
        assert got.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"), ({"prompt": {}}, "prompt"), ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"), ({"prompt": [[[5]]]}, "prompt"), ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"), ({"prompt": [99999]}, "prompt"), ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 200, "n": 2}, "n"), ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -7584}, "max_tokens"),
        ({"best_of": 2}, "best_of"), ({"suffix": "x"}, "suffix"), ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"), ({"messages": []}, "messages"), ({"prompt": "x" * 10**6}, "prompt"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(
    refused: Callable[..., str], service: FakeService, field: dict[str, Any], param: str
) -> None:
    assert refused(PATH, {"prompt": "a", **field}, param)
    assert service.live == set()


def test_best_of_equal_n(client: Client) -> None:
    assert client.post(PATH, {"prompt": "a", "n": 2, "best_of": 2}).status_code == 200
