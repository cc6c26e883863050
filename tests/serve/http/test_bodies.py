"""Bodies that are no requests: never 500, never read beyond the limit."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quantkit_serve.http.settings import HttpSettings

from .conftest import Client
from .fakes import make

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
JSON = {"Content-Type": "application/json"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


def deep(levels: int) -> str:
    return '{"type": "object", "properties": {"a": ' * levels + '{"type": "string"}' + "}}" * levels


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b"5", b'"x"', b"\xff\xfe", b'{"messages": NaN}', b'{"temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000,
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": "a", "max_tokens": 1e400}',
        b'{"tokens": [1.5]}', b'{"tokens": [' + b"9" * 400 + b"]}", b'{"prompt": {"$ref": "#"}}',
        b'{"prompt": "a", "logit_bias": {"\\u0664": 1}}', b'{"prompt": "a"} {"prompt": "b"}',
    ],
    ids=lambda b: repr(b[:40]),
)  # fmt: skip
def test_malformed_bodies(client: Client, path: str, body: bytes) -> None:
    got = client.post(path, content=body, headers=JSON)
    if got.status_code != 200:  # some are what one of the paths accepts
        assert got.status_code == 400
        assert set(got.json()["error"]) == {"message", "type", "param", "code"}
        assert len(got.json()["error"]["message"]) < 2000


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"5", b'"x"'])
def test_a_body_that_is_no_object(client: Client, body: bytes) -> None:
    got = client.post("/v1/completions", content=body, headers=JSON)
    assert got.status_code == 400 and got.json()["error"]["message"] == "a JSON object is needed as the body"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""])
def test_only_json_is_read(client: Client, kind: str) -> None:
    """A page elsewhere may send these without asking first."""
    got = client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": kind})
    assert got.status_code == 400 and "application/json" in got.json()["error"]["message"]


def test_json_with_a_charset_is_json(client: Client) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 200


def test_ten_megabytes_are_refused_unread(client: Client) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 100_000
            yield b" " * 100_000

    announced = client.post("/v1/completions", content=chunks(), headers={**JSON, "Content-Length": "10000000"})
    assert announced.status_code == 413 and sent == 0
    assert announced.json()["error"]["code"] == "request_too_large"
    unannounced = client.post("/v1/completions", content=chunks(), headers=JSON)
    assert unannounced.status_code == 413 and sent < 9_000_000


def test_the_limit_itself_passes() -> None:
    body = json.dumps({"prompt": "a"}).encode()
    for limit, status in ((len(body), 200), (len(body) - 1, 413)):
        _, app = make(HttpSettings(max_body_bytes=limit))
        assert Client(app).post("/v1/completions", content=body, headers=JSON).status_code == status


@pytest.mark.parametrize("levels", [64, 1000])
def test_a_deep_schema(client: Client, levels: int) -> None:
    """64 levels are for the engine to judge; what no parser should follow is refused."""
    wanted = '{"type": "json_schema", "json_schema": {"name": "n", "schema": ' + deep(levels) + "}}"
    body = json.dumps(CHAT)[:-1] + ', "response_format": ' + wanted + "}"
    got = client.post("/v1/chat/completions", content=body.encode(), headers=JSON)
    assert got.status_code == (200 if levels == 64 else 400), got.text


def test_many_errors_are_told_in_short(client: Client) -> None:
    got = client.post("/v1/completions", {"prompt": "a", **{f"field{i}": 1 for i in range(50)}})
    assert got.status_code == 400 and "and 45 more" in got.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("POST", "/nope", 404), ("GET", "/v1/completions", 405), ("PUT", "/health", 405)],
)
def test_paths_and_methods_that_are_not_there(client: Client, method: str, path: str, status: int) -> None:
    got = client.request(method, path)
    assert got.status_code == status and set(got.json()["error"]) == {"message", "type", "param", "code"}


def test_a_bug_is_a_500_in_the_same_shape(client: Client, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "submit", lambda request: 1 / 0)
    got = client.post("/v1/completions", {"prompt": "a"})
    assert got.status_code == 500 and got.json()["error"]["type"] == "server_error"
    assert "zero" not in got.text
