"""An endpoint as a candidate: our own server against the same model in process, and servers that misbehave."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quantkit.data import bundled_model
from quantkit.errors import ArtifactError, EnvironmentProblem, UsageError
from quantkit_evals.candidates.endpoint import EndpointCandidate
from quantkit_evals.candidates.engine import EngineCandidate
from quantkit_evals.candidates.pair import Pair
from quantkit_evals.candidates.retrying import TRIES
from quantkit_evals.configuration import Configuration
from quantkit_evals.harness.run_tasks import run_tasks
from quantkit_serve.config import CacheConfig, EngineConfig, ModelConfig
from quantkit_serve.engine.loop import EngineService
from quantkit_serve.http.app import create_app
from quantkit_serve.http.server import Server, listen
from quantkit_serve.http.settings import HttpSettings
from quantkit_serve.start.assembly import assemble
from quantkit_serve.start.servable import Servable
from tests.evals.engine.small_tasks import answering, choice, cloze, rolling

TEXT = "They went down to the river, and there they found a boat which had been left by an old man."
TASKS = [
    choice({"id": 1, "text": "The man", "choices": [" went home that day.", " blue of is"], "answer": 0}),
    cloze(*({"id": n, "text": TEXT[: 20 + n], "target": TEXT[20 + n : 30 + n]} for n in range(10))),
    rolling({"id": 1, "text": TEXT}),
    answering({"id": 1, "text": TEXT, "target": "x"}, {"id": 2, "text": TEXT[:30], "target": "x"}),
]


@pytest.fixture(scope="module")
def url(artifact: Path) -> Iterator[str]:
    settings = EngineConfig(ModelConfig("fp8", "float32"), CacheConfig("f32", 16, 64 << 20))
    made = assemble(Servable(artifact, "tiny-w4"), settings)
    app = create_app(EngineService(made.engine), made.tokenizer, HttpSettings())
    server = Server(app, drain_s=5, log_level="warning")
    ready = threading.Event()
    urls: list[str] = []

    def on_ready(found: str) -> None:
        urls.append(found)
        ready.set()

    thread = threading.Thread(target=server.run_on, args=(listen("127.0.0.1", 0), on_ready))
    thread.start()
    assert ready.wait(20)
    yield urls[0]
    server.request_drain()
    thread.join(20)


@pytest.mark.parametrize("sends", ["ids", "text"])
def test_our_server_answers_as_the_engine_does(artifact: Path, url: str, sends: Any) -> None:
    ours = EngineCandidate(Servable(artifact, "tiny-w4"), Configuration("fp8", "f32", "prefill", "float32"))
    expected = run_tasks(ours, TASKS)
    candidate = EndpointCandidate(url, tokenizer=artifact / "decode", sends=sends)
    found = run_tasks(candidate, TASKS)
    for one, other in zip(found.items, expected.items, strict=True):
        assert one.values == pytest.approx(dict(other.values), abs=1e-3, rel=1e-4), one.task
        assert (one.item, one.prompt_sha256, one.context_tokens) == (
            other.item,
            other.prompt_sha256,
            other.context_tokens,
        )
    assert [task.path for task in found.tasks] == ["unknown", "unknown", "unknown", "generate"]
    assert found.label == f"tiny-w4 at {url}/v1" and found.candidate["kind"] == "endpoint"
    assert candidate.max_length == 2046
    answers = [made.lm().generate_until(_instances(TASKS[3])) for made in (candidate, ours)]
    assert answers[0] == answers[1] and any(answers[0])


def test_schemas_are_enforced_by_ours_and_by_the_endpoint(artifact: Path, url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [3, 4]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    source = answering(
        {"id": 1, "text": "A number:", "target": "x"}, json_schema=schema, max_gen_toks=80, until=[]
    )
    ours = EngineCandidate(Servable(artifact, "tiny-w4"), Configuration("fp8", "f32", "prefill", "float32"))
    for candidate in (ours, EndpointCandidate(url, tokenizer=artifact / "decode")):
        (text,) = candidate.lm().generate_until(_instances(source))
        assert json.loads(text)["n"] in (3, 4)


def _instances(source: Any) -> list[Any]:
    task = source.lm_eval_task()
    task.build_all_requests()
    return list(task.instances)


class Server5:
    """Answers as a server might: ``behave`` gets the number of the request and a right answer."""

    def __init__(self, behave: Callable[[int, dict[str, Any]], httpx.Response | None]) -> None:
        self.behave, self.count = behave, 0
        self.body: dict[str, Any] = {}
        self.waits: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 512}]})
        body = self.body = json.loads(request.content)
        choices = []
        for index, tokens in enumerate(body["prompt"]):
            values = [None, *(-0.5 for _ in tokens)]
            tops = [None, *({"a": -0.5} for _ in tokens)]
            choices.append(
                {"index": index, "text": "", "logprobs": {"token_logprobs": values, "top_logprobs": tops}}
            )
        self.count += 1
        right = {"choices": choices[::-1]}
        return self.behave(self.count, right) or httpx.Response(200, json=right)

    def candidate(self, **settings: Any) -> EndpointCandidate:
        return EndpointCandidate(
            "http://far", tokenizer=bundled_model("tiny-glm"), transport=httpx.MockTransport(self),
            sleep=self.waits.append, concurrency=1, **settings,
        )  # fmt: skip


MANY = [cloze(*({"id": n, "text": f"Number {n} and", "target": " is one"} for n in range(40)))]


def test_a_server_that_is_busy_for_a_while() -> None:
    def busy(count: int, right: Any) -> httpx.Response | None:
        if count == 1:
            raise httpx.ConnectError("refused")
        return httpx.Response(503, headers={"Retry-After": "7"}) if count == 2 else None

    server = Server5(busy)
    run = run_tasks(server.candidate(), MANY)
    assert len(run.items) == 40 and server.waits == [0.5, 7.0]
    assert run.items[0].values == {"acc": 1, "perplexity": 1.0}


def test_a_server_that_fails_midway_keeps_what_was_done(tmp_path: Path) -> None:
    server = Server5(lambda count, right: httpx.Response(500, text="on fire") if count > 2 else None)
    with pytest.raises(
        EnvironmentProblem, match=r"failed 6 times in a row, last with: HTTP 500: on fire.*16 of 40"
    ):
        run_tasks(server.candidate(), MANY, cache=tmp_path)
    assert server.count == 2 + TRIES
    healed = Server5(lambda count, right: None)
    run = run_tasks(healed.candidate(), MANY, cache=tmp_path)
    assert len(run.items) == 40 and healed.count == 3


def change(right: dict[str, Any], **logprobs: Any) -> httpx.Response:
    for one in right["choices"]:
        one["logprobs"] = {**one["logprobs"], **logprobs}
    return as_text(json.dumps(right))


def as_text(text: str) -> httpx.Response:
    return httpx.Response(200, text=text)


def renumbered(right: dict[str, Any], index: Any) -> httpx.Response:
    """All choices with the same number."""
    return httpx.Response(200, json={"choices": [{**one, "index": index} for one in right["choices"]]})


@pytest.mark.parametrize(
    ("behave", "error", "message"),
    [
        (
            lambda n, right: httpx.Response(400, text="no echo here"),
            EnvironmentProblem,
            "refuses with HTTP 400: no echo",
        ),
        (lambda n, right: httpx.Response(401, text="no"), EnvironmentProblem, "HTTP 401: no. A key is read from"),
        (lambda n, right: httpx.Response(200, text="<html>"), EnvironmentProblem, "answers no JSON: <html>"),
        (
            lambda n, right: httpx.Response(200, json={"choices": []}),
            EnvironmentProblem,
            "does not give 8 choices",
        ),
        (
            lambda n, right: change(right, token_logprobs=[None, -1.0]),
            EnvironmentProblem,
            "counts 1 tokens, the token",
        ),
        (lambda n, right: change(right, top_logprobs=None), EnvironmentProblem, "gives no logprobs of prompts"),
        (
            lambda n, right: change(right, token_logprobs=[None] * 8),
            ArtifactError,
            "task cloze, item .*not numbers",
        ),
        (lambda n, right: change(right, top_logprobs=[]), EnvironmentProblem, "9 token_logprobs and 0 top_log"),
        (lambda n, right: change(right, token_logprobs=["x"] * 8), EnvironmentProblem, "no log-probability: 'x'"),
        (lambda n, right: change(right, token_logprobs=[3.5] * 8), EnvironmentProblem, "no log-probability: 3.5"),
        (
            lambda n, right: change(right, top_logprobs=[{"a": "b"}] * 8),
            EnvironmentProblem,
            "no top_logprobs: {'a",
        ),
        (
            lambda n, right: as_text(json.dumps({"choices": right["choices"]}).replace("-0.5", "NaN")),
            ArtifactError,
            "not numbers",
        ),
        (
            lambda n, right: change(right, top_logprobs=[None] * 8),
            EnvironmentProblem,
            "no top_logprobs: None",
        ),
        (lambda n, right: change(right, top_logprobs=[{}] * 8), EnvironmentProblem, "no top_logprobs: {}"),
        (
            lambda n, right: change(right, top_logprobs=[{"a": math.nan}] * 8),
            EnvironmentProblem,
            "no top_logprobs: {'a': nan}",
        ),
        (
            lambda n, right: change(right, token_logprobs=[-(10**400)] * 8),
            EnvironmentProblem,
            "no log-probability: -1000",
        ),
        (
            lambda n, right: change(right, top_logprobs=[{"\ufffd": -0.5}] * 8),
            EnvironmentProblem,
            "tells tokens by their text",
        ),
        (lambda n, right: renumbered(right, "0"), EnvironmentProblem, "numbers 8 choices"),
        (lambda n, right: renumbered(right, None), EnvironmentProblem, "numbers 8 choices"),
        (
            lambda n, right: as_text("[" * 100_000),
            EnvironmentProblem,
            "answers no JSON",
        ),
        (
            lambda n, right: httpx.Response(
                200, stream=httpx.ByteStream(b"not compressed at all"), headers={"content-encoding": "gzip"}
            ),
            EnvironmentProblem,
            "can't be read",
        ),
    ],
)
def test_servers_that_misbehave(behave: Any, error: Any, message: str) -> None:
    server = Server5(behave)
    with pytest.raises(error, match=message):
        run_tasks(server.candidate(), MANY)
    assert server.waits == []


@pytest.mark.parametrize("second", [-0.5, -9.0])
def test_tokens_that_are_no_text_are_told_by_their_ids(second: float) -> None:
    """Two of them have one text, of which the one that is scored may not be the most likely."""

    def behave(count: int, right: dict[str, Any]) -> httpx.Response:
        if not server.body.get("return_tokens_as_token_ids"):
            return change(right, top_logprobs=[{"\ufffd": -0.5}] * 8)
        return change(right, top_logprobs=[{"token_id:7": -0.5, "token_id:8": second + 0.1}] * 8)

    server = Server5(behave)
    run = run_tasks(server.candidate(), MANY, limit=8)
    assert {item.values["acc"] for item in run.items} == {float(second < -0.6)} and server.count == 2


def test_a_server_that_has_no_token_ids_says_why() -> None:
    def behave(count: int, right: dict[str, Any]) -> httpx.Response:
        if server.body.get("return_tokens_as_token_ids"):
            return httpx.Response(400, text="unknown field")
        return change(right, top_logprobs=[{"\ufffd": -0.5}] * 8)

    server = Server5(behave)
    with pytest.raises(
        EnvironmentProblem, match=r"HTTP 400: unknown field. It was asked for token ids: the endpoint"
    ):
        run_tasks(server.candidate(), MANY)


def test_a_hint_stays_beside_what_is_kept(tmp_path: Path) -> None:
    server = Server5(lambda count, right: httpx.Response(401, text="no"))
    with pytest.raises(EnvironmentProblem, match=r"A key is read from .*OPENAI_API_KEY. 0 of 40 answers are kept"):
        run_tasks(server.candidate(), MANY, cache=tmp_path)


def test_what_is_asked_of_no_server() -> None:
    tokenizer = bundled_model("tiny-glm")
    with pytest.raises(UsageError, match="is no URL of a server"):
        EndpointCandidate("far:80", tokenizer=tokenizer)
    server = Server5(lambda count, right: None)
    with pytest.raises(UsageError, match="has no model 'x'; accepted: m"):
        run_tasks(server.candidate(model="x"), MANY)
    long = cloze({"id": 0, "text": "word " * 600, "target": " is"}, {"id": 1, "text": "A", "target": " is"})
    assert "the endpoint takes 512" in run_tasks(server.candidate(), [long]).tasks[0].skipped[0].reason
    whole = run_tasks(server.candidate(), [rolling({"id": 0, "text": "word " * 1100})])
    assert whole.items[0].context_tokens == 511  # of a window; the server generates one more


def test_a_server_that_stays_silent_is_not_asked_for_hours() -> None:
    def silent(count: int, right: Any) -> httpx.Response:
        raise httpx.ReadTimeout("timed out")

    server = Server5(silent)
    with pytest.raises(EnvironmentProblem, match="failed 2 times in a row, last with: timed out"):
        run_tasks(server.candidate(), MANY)


def test_who_stops_listening_waits_for_nobody() -> None:
    """As Ctrl-C does: a server that hangs must not hold the process."""
    hanging, is_over = threading.Event(), threading.Event()

    def hang(count: int, right: Any) -> None:
        if count > 1:
            hanging.set()
            is_over.wait(60)

    server = Server5(hang)
    pairs = [Pair((1, 2), (3, number)) for number in range(40)]
    answers = server.candidate().score(pairs)
    next(answers)
    assert hanging.wait(20)
    answers.close()  # type: ignore[attr-defined]  # a generator's
    assert not is_over.is_set()
    is_over.set()
    while any(thread.name == "endpoint" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert server.count == 2  # what was not asked yet is never asked


@pytest.mark.parametrize(
    "url", ["http://me:secret@far/v1", "http://far/v1?key=secret", "http://far:port", "http://"]
)
def test_addresses_that_reports_can_not_show(url: str) -> None:
    with pytest.raises(UsageError, match=r"has more than|is no URL") as raised:
        EndpointCandidate(url, tokenizer=bundled_model("tiny-glm"))
    assert "secret" not in str(raised.value)


def test_a_key_that_no_header_can_hold_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-sec\nret")
    with pytest.raises(EnvironmentProblem, match="OPENAI_API_KEY: holds characters") as raised:
        Server5(lambda count, right: None).candidate()
    assert "sec" not in str(raised.value)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")  # as $(cat FILE) of a file with two line ends
    assert Server5(lambda count, right: None).candidate().model == "m"


@pytest.mark.parametrize(
    ("entry", "room"), [({}, 2048), ({"max_model_len": 64}, 64), ({"max_model_len": True}, None),
                        ({"max_model_len": -1}, None), ({"max_model_len": "64"}, None)]
)  # fmt: skip
def test_how_many_tokens_a_server_takes(entry: dict[str, Any], room: int | None) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return as_text(json.dumps({"data": [{"id": "m", **entry}, {"id": "half \ud800"}, 3]}))

    candidate = EndpointCandidate(
        "http://far", tokenizer=bundled_model("tiny-glm"), transport=httpx.MockTransport(answer)
    )
    if room is None:
        with pytest.raises(EnvironmentProblem, match="does not say how many tokens"):
            assert candidate.max_length
    else:
        assert candidate.max_length == room - 2


@pytest.mark.parametrize("answer", ['{"data": 5}', '{"data": []}', "[]", '{"data": [{"id": "half \\ud800"}]}'])
def test_a_server_that_lists_no_model(answer: str) -> None:
    candidate = EndpointCandidate(
        "http://far", tokenizer=bundled_model("tiny-glm"), transport=httpx.MockTransport(lambda _: as_text(answer))
    )
    with pytest.raises(EnvironmentProblem, match="/v1/models: the server lists no model"):
        assert candidate.label
