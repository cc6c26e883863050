"""OpenAI's own client against a real server on the loopback interface: every endpoint, whole and streamed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import openai
import pytest

from quantkit_serve.http.server import Server, listen
from quantkit_serve.http.settings import HttpSettings
from quantkit_serve.refusal import Overloaded

from .fakes import CONTEXT, SCRIPT, FakeService, make

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Where?"}]


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[FakeService, str]]:
    service, app = make(HttpSettings(api_keys=("sk-test",), served_names=("tiny", "tiny-glm"), fingerprint="pair"))
    server = Server(app, drain_s=5, log_level="warning")
    ready = threading.Event()
    urls: list[str] = []

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    thread = threading.Thread(target=server.run_on, args=(listen("127.0.0.1", 0), on_ready))
    thread.start()
    assert ready.wait(20)
    yield service, urls[0]
    server.request_drain()
    thread.join(20)
    assert not thread.is_alive() and service.num_stops == 1


@pytest.fixture
def service(running: tuple[FakeService, str]) -> FakeService:
    running[0].reset()
    return running[0]


@pytest.fixture(scope="module")
def api(running: tuple[FakeService, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running[1] + "/v1", api_key="sk-test", max_retries=0, timeout=20) as client:
        yield client


def test_models(api: openai.OpenAI) -> None:
    assert [m.id for m in api.models.list()] == ["tiny", "tiny-glm"]
    assert api.models.retrieve("tiny-glm").owned_by == "quantkit"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("gpt/5")


def test_chat(api: openai.OpenAI, service: FakeService) -> None:
    got = api.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3, n=2, seed=1)
    assert [c.message.content for c in got.choices] == [SCRIPT, SCRIPT]
    assert got.system_fingerprint == "pair" and got.model == "tiny"
    entries = got.choices[1].logprobs
    assert entries is not None and entries.content is not None
    assert b"".join(bytes(e.bytes or ()) for e in entries.content).decode() == SCRIPT
    assert all(len(e.top_logprobs) == 3 for e in entries.content)
    assert got.usage is not None and got.usage.completion_tokens == 2 * len(service.script)


def test_chat_streamed(api: openai.OpenAI, service: FakeService) -> None:
    with api.chat.completions.stream(model="tiny", messages=MESSAGES, stream_options={"include_usage": True}) as s:
        deltas = [e.delta for e in s if e.type == "content.delta"]
        final = s.get_final_completion()
    assert "".join(deltas) == SCRIPT == final.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None and final.usage.completion_tokens == len(service.script)


def test_completions(api: openai.OpenAI, service: FakeService) -> None:
    got = api.completions.create(model="tiny", prompt=["a", "b"], max_tokens=2, echo=True, logprobs=1)
    assert [c.text for c in got.choices] == ["aThe river", "bThe river"]
    assert got.choices[0].logprobs is not None and got.choices[0].logprobs.tokens == ["a", "The", " river"]
    ids = api.completions.create(model="tiny", prompt=[[5, 6], [7]], max_tokens=0, echo=True)
    assert [c.finish_reason for c in ids.choices] == ["length", "length"]


def test_completions_streamed(api: openai.OpenAI, service: FakeService) -> None:
    chunks = list(api.completions.create(model="tiny", prompt="a", max_tokens=99, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == SCRIPT
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_parsed_output(api: openai.OpenAI, service: FakeService) -> None:
    api.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
    )
    grammar = service.requests[0].params.grammar
    assert grammar is not None and grammar.kind == "json_schema"


def test_errors_are_the_clients_own(api: openai.OpenAI, service: FakeService, running: tuple[object, str]) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256"):
        api.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10**12)
    with pytest.raises(openai.NotFoundError) as missing:
        api.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.AuthenticationError):
        api.with_options(api_key="sk-wrong").models.list()
    service.refusal = Overloaded("the queue is full")
    with pytest.raises(openai.RateLimitError):
        api.chat.completions.create(model="tiny", messages=MESSAGES)
    service.refusal = None
    service.error = "page 7 is not yours"
    with pytest.raises(openai.InternalServerError, match="page 7"):
        api.chat.completions.create(model="tiny", messages=MESSAGES)
    with pytest.raises(openai.APIError, match="page 7"):
        list(api.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))


def test_ten_megabytes_get_an_answer(api: openai.OpenAI, service: FakeService) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        api.completions.create(model="tiny", prompt="a" * 10_000_000)
    assert error.value.status_code == 413


def test_leaving_a_stream_aborts(api: openai.OpenAI, service: FakeService) -> None:
    service.endless = True
    with api.completions.create(model="tiny", prompt="a", max_tokens=200, stream=True) as stream:
        assert next(iter(stream)).choices[0].text
    for _ in range(1000):
        if not service.live:
            break
        threading.Event().wait(0.01)
    assert service.live == set() and len(service.aborted) == 1


def test_other_endpoints(running: tuple[FakeService, str], service: FakeService) -> None:
    with httpx.Client(base_url=running[1], headers={"Authorization": "Bearer sk-test"}) as client:
        found = client.post("/tokenize", json={"prompt": "Über", "return_token_strs": True}).json()
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert found["max_model_len"] == CONTEXT
        assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "Über"}
        for path in ("/health", "/version", "/metrics", "/openapi.json", "/live", "/"):
            got = client.get(path)
            assert got.status_code == 200 and "server" not in got.headers
