"""Chat completions: whole replies, and the exact order and shape of chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quantkit_serve.http.app import create_app
from quantkit_serve.http.settings import HttpSettings
from quantkit_serve.http.template import ChatTemplate
from quantkit_serve.http.tokenizer import Tokenizer
from quantkit_serve.refusal import Overloaded, Refused, Unavailable
from quantkit_serve.request import Grammar

from .conftest import Client
from .fakes import CONTEXT, SCRIPT, FakeService

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Where does it go?"}]


def test_a_whole_reply(client: Client, service: FakeService) -> None:
    got = client.post(PATH, {"model": "tiny-glm", "messages": MESSAGES}).json()
    assert set(got) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert got["object"] == "chat.completion" and got["id"].startswith("chatcmpl-")
    assert got["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": SCRIPT, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    (request,) = service.requests
    text = "[gMASK]<sop><|user|>\nWhere does it go?<|assistant|>\n"
    assert list(request.prompt) == service.tokenizer.encode(text, add_special_tokens=False)
    assert request.params.max_tokens == CONTEXT - len(request.prompt)
    num_prompt, num_said = len(request.prompt), len(service.script)
    assert got["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_said,
        "total_tokens": num_prompt + num_said,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_chunks_follow_openais_rules(client: Client) -> None:
    *chunks, done = client.events(PATH, {"messages": MESSAGES, "stream": True})
    assert done == "[DONE]"
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    assert not any("usage" in c for c in chunks)
    choices = [c["choices"][0] for c in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert not any("role" in c["delta"] for c in choices[1:])
    assert "".join(c["delta"].get("content", "") for c in choices) == SCRIPT
    assert "\ufffd" not in "".join(c["delta"].get("content", "") for c in choices)
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[-1]["delta"] == {}


@pytest.mark.parametrize("continuous", [False, True])
def test_usage_stands_in_the_last_chunk(client: Client, service: FakeService, continuous: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    *chunks, last, _ = client.events(PATH, {"messages": MESSAGES, "stream": True, "stream_options": options})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(service.script)
    if continuous:
        counts = [c["usage"]["completion_tokens"] for c in chunks]
        assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == len(service.script)
    else:
        assert all(c["usage"] is None for c in chunks)


def test_logprobs(client: Client, service: FakeService) -> None:
    got = client.post(PATH, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 2}).json()
    found = got["choices"][0]["logprobs"]
    assert found["refusal"] is None
    tokens = service.script[:2]
    for at, (entry, token) in enumerate(zip(found["content"], tokens, strict=True)):
        data = service.tokenizer.token_bytes(token)
        assert entry["token"] == data.decode() and entry["bytes"] == list(data)
        assert entry["logprob"] == -0.25 * (at + 1)
        assert [t["logprob"] for t in entry["top_logprobs"]] == [-0.25 * (at + 1), -0.25 * (at + 1) - 1]
        assert set(entry["top_logprobs"][0]) == {"token", "logprob", "bytes"}
    assert got["choices"][0]["finish_reason"] == "length"


def test_logprobs_of_the_chosen_token_alone(client: Client) -> None:
    got = client.post(PATH, {"messages": MESSAGES, "logprobs": True}).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in got)


def test_streamed_logprobs_come_with_every_token(client: Client, service: FakeService) -> None:
    *chunks, _ = client.events(PATH, {"messages": MESSAGES, "stream": True, "logprobs": True})
    found = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert bytes(b for e in found for b in e["bytes"]).decode() == SCRIPT
    assert len(found) == len(service.script)


def test_several_choices(client: Client, service: FakeService) -> None:
    got = client.post(PATH, {"messages": MESSAGES, "n": 3, "seed": 5, "max_tokens": 2}).json()
    assert [c["index"] for c in got["choices"]] == [0, 1, 2]
    assert sorted(r.params.seed or 0 for r in service.requests) == [5, 6, 7]
    assert got["usage"]["completion_tokens"] == 6
    assert got["usage"]["prompt_tokens"] == len(service.requests[0].prompt)
    *chunks, _ = client.events(PATH, {"messages": MESSAGES, "n": 3, "stream": True})
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in mine) == SCRIPT
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]


def test_every_sampling_field_reaches_the_engine(client: Client, service: FakeService) -> None:
    body = {
        "messages": MESSAGES, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": 0.2,
        "presence_penalty": -0.3, "repetition_penalty": 1.1, "logit_bias": {"5": 2, "6": -100}, "seed": -9,
        "stop": ["x", "yz"], "stop_token_ids": [3, 4], "ignore_eos": True, "min_tokens": 1,
        "max_completion_tokens": 3, "cache_salt": "tenant",
    }  # fmt: skip
    assert client.post(PATH, body).status_code == 200
    (request,) = service.requests
    params = request.params
    assert request.cache_salt == "tenant"
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.2, -0.3, 1.1)
    assert params.logit_bias == {5: 2, 6: -100} and params.seed == -9
    assert params.stop == ("x", "yz") and params.stop_token_ids == {3, 4}
    assert params.ignore_eos and params.min_tokens == 1 and params.max_tokens == 3


def test_absent_and_null_are_the_same(client: Client, service: FakeService) -> None:
    names = ("temperature", "top_p", "top_k", "stop", "seed", "logit_bias", "n", "stream", "max_tokens", "tools",
             "response_format",
             "stop_token_ids", "logprobs", "user", "metadata", "store", "prediction")  # fmt: skip
    assert client.post(PATH, {"messages": MESSAGES, **dict.fromkeys(names)}).status_code == 200
    assert client.post(PATH, {"messages": MESSAGES}).status_code == 200
    first, second = service.requests
    assert first.params == second.params


@pytest.mark.parametrize(
    "field",
    [
        {"user": "me"}, {"metadata": {"a": "b"}}, {"store": False}, {"service_tier": "auto"},
        {"modalities": ["text"]}, {"safety_identifier": "x"}, {"prompt_cache_key": "x"}, {"top_k": -1},
        {"parallel_tool_calls": True}, {"use_beam_search": False}, {"skip_special_tokens": True}, {"priority": 0},
        {"length_penalty": 1}, {"response_format": {"type": "text"}}, {"stop": "one"}, {"tool_choice": "none"},
    ],
    ids=str,
)  # fmt: skip
def test_what_changes_nothing_is_accepted(client: Client, field: dict[str, Any]) -> None:
    assert client.post(PATH, {"messages": MESSAGES, **field}).status_code == 200


@pytest.mark.parametrize(
    ("field", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "array"}},
                }
            },
            Grammar("json_schema", '{"type": "array"}'),
        ),
        ({"structured_outputs": {"json": {"type": "null"}}}, Grammar("json_schema", '{"type": "null"}')),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a.b", "c"]}}, Grammar("regex", r"(?:a\.b)|(?:c)")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"guided_regex": "[0-9]"}, Grammar("regex", "[0-9]")),
        ({"guided_json": '{"type": "null"}'}, Grammar("json_schema", '{"type": "null"}')),
        ({"guided_choice": ["yes"]}, Grammar("regex", "(?:yes)")),
    ],
    ids=str,
)
def test_output_that_is_enforced(
    client: Client, service: FakeService, field: dict[str, Any], grammar: Grammar
) -> None:
    assert client.post(PATH, {"messages": MESSAGES, **field}).status_code == 200
    found = service.requests[0].params.grammar
    assert found == grammar and found.param.startswith(next(iter(field)))


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (Refused("no such thing", param="seed"), 400, "invalid_request_error"),
        (Overloaded("the queue is full"), 429, "rate_limit_error"),
        (Unavailable("the engine is dead"), 503, "server_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_has_its_status(
    client: Client, service: FakeService, refusal: Refused, status: int, kind: str, stream: bool
) -> None:
    service.refusal = refusal
    got = client.post(PATH, {"messages": MESSAGES, "stream": stream})
    assert got.status_code == status
    error = got.json()["error"]
    assert (error["message"], error["type"], error["param"]) == (str(refusal), kind, refusal.param)
    assert ("retry-after" in got.headers) == (status in (429, 503))


def test_an_error_of_the_engine_is_a_status_or_an_event(client: Client, service: FakeService) -> None:
    service.error = "page 7 belongs to someone else"
    got = client.post(PATH, {"messages": MESSAGES})
    assert got.status_code == 500 and got.json()["error"]["message"] == service.error
    *chunks, error, done = client.events(PATH, {"messages": MESSAGES, "stream": True})
    assert done == "[DONE]" and error["error"]["message"] == service.error
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
    assert service.live == set()


@pytest.mark.parametrize(("status", "code"), [(400, None), (504, "timeout")])
def test_whose_fault_an_error_is(client: Client, service: FakeService, status: int, code: str | None) -> None:
    service.error, service.error_status = "the grammar can't go on", status
    got = client.post(PATH, {"messages": MESSAGES})
    assert got.status_code == status and got.json()["error"]["code"] == code


def test_one_failing_choice_ends_the_others(client: Client, service: FakeService) -> None:
    service.error = "no"
    assert client.post(PATH, {"messages": MESSAGES, "n": 4}).status_code == 500
    assert service.live == set() and len(service.aborted) == 3


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"), ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"top_logprobs": 1}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"), ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"temperature": -0.1}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"), ({"top_k": -2}, "top_k"), ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"n": 0}, "n"), ({"n": 129}, "n"), ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"), ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"stop": [""]}, "stop"), ({"stop": [1]}, "stop"), ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"), ({"seed": 1 << 63}, "seed"), ({"seed": "x"}, "seed"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "text", "strict": True}}, "response_format.strict"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"no_such_field": 1}, "no_such_field"), ({"store": True}, "store"), ({"functions": []}, "functions"),
        ({"audio": {}}, "audio"), ({"modalities": ["audio"]}, "modalities.0"), ({"prediction": {}}, "prediction"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"), ({"use_beam_search": True}, "use_beam_search"),
        ({"skip_special_tokens": False}, "skip_special_tokens"), ({"priority": 1}, "priority"),
        ({"service_tier": "flex"}, "service_tier"), ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"chat_template": "{{ messages }}"}, "chat_template"), ({"echo": True}, "echo"),
        ({"logit_bias": []}, "logit_bias"),
        ({"cache_salt": 5}, "cache_salt"), ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]},
         "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}, {"role": "tool"}]}, "messages.1"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(
    refused: Callable[..., str], field: dict[str, Any], param: str
) -> None:
    assert refused(PATH, {"messages": MESSAGES, **field}, param)


def test_vllms_words_for_a_full_context(refused: Callable[..., str], service: FakeService) -> None:
    message = refused(PATH, {"messages": MESSAGES, "max_tokens": 10**12}, "max_tokens")
    assert message.startswith(f"This model's maximum context length is {CONTEXT} tokens. However, you requested")
    assert service.requests == []


def test_the_pages_limit_too(client: Client, service: FakeService, refused: Callable[..., str]) -> None:
    """A pool of 3 pages of 4 tokens holds 12: an answer's last token is never stored."""
    small = FakeService(service.tokenizer, kv_pages=3)
    app = create_app(small, service.tokenizer, HttpSettings())
    prompt = [5, 6, 7]
    assert Client(app).post("/v1/completions", {"prompt": prompt, "max_tokens": 10}).status_code == 200
    got = Client(app).post("/v1/completions", {"prompt": prompt, "max_tokens": 11})
    assert got.status_code == 400 and "KV cache of this server holds 12" in got.json()["error"]["message"]
    assert Client(app).get("/v1/models").json()["data"][0]["max_model_len"] == 13


def test_tools_go_through_the_template(service: FakeService) -> None:
    """``auto`` shows them to the model, ``none`` doesn't; calls of earlier turns are shown as objects."""
    source = "{{ tools | tojson if tools else 'none' }}{% for m in messages %}{{ m.content }}"
    source += "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}{{ effort }}"
    tokenizer = Tokenizer(service.tokenizer.raw, {"default": ChatTemplate(source, {})})
    client = Client(create_app(service, tokenizer, HttpSettings()))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "8"}]
    for choice in ("auto", None, "none"):
        body = {"messages": messages, "tools": [tool], "tool_choice": choice}
        assert client.post(PATH, {**body, "chat_template_kwargs": {"effort": "!"}}).status_code == 200
    texts = [service.tokenizer.raw.decode(list(r.prompt)) for r in service.requests]
    shown = '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'
    assert texts == [f"{start}Where does it go?78!" for start in (shown, shown, "none")]


def test_an_unknown_model(refused: Callable[..., str]) -> None:
    assert "tiny-glm" in refused(PATH, {"model": "gpt-5", "messages": MESSAGES}, "model", 404)


def test_contents_in_parts_are_joined(client: Client, service: FakeService) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    client.post(PATH, {"messages": [{"role": "user", "content": parts}]})
    client.post(PATH, {"messages": [{"role": "user", "content": "a\nb"}]})
    first, second = service.requests
    assert first.prompt == second.prompt


def test_what_clients_send_back_of_an_answer_is_accepted(client: Client) -> None:
    answer = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None,
              "function_call": None, "tool_calls": None}  # fmt: skip
    assert client.post(PATH, {"messages": [*MESSAGES, answer, *MESSAGES]}).status_code == 200
