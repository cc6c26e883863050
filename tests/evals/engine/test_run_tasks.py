"""Tasks become records of items: values, weights, clusters, digests; and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantkit.errors import ArtifactError, UsageError
from quantkit_evals.candidates.candidate import Progress
from quantkit_evals.candidates.engine import EngineCandidate
from quantkit_evals.candidates.generation import parse_generation
from quantkit_evals.configuration import Configuration
from quantkit_evals.harness.run_tasks import run_tasks
from quantkit_evals.run import Metric
from quantkit_serve.start.servable import Servable
from tests.evals.engine.fake import Fake
from tests.evals.engine.small_tasks import Source, answering, choice, cloze, rolling

CHOICE = choice(
    {"id": "a", "cluster": "x", "text": "The man", "choices": [" went home.", " blue"], "answer": 0},
    {"id": "b", "cluster": "x", "text": "She", "choices": [" said that it was so.", " is of"], "answer": 0},
    {"id": "c", "cluster": "y", "text": "It was", "choices": [" the the", " a long time ago"], "answer": 1},
)
CLOZE = cloze(
    {"id": 1, "text": "He came into the", "target": " room"}, {"id": 2, "text": "I do not", "target": " know"}
)
ROLLING = rolling({"id": "r", "text": "One day they went to the house of a friend."})


class _Empty(Source):
    def lm_eval_task(self) -> Any:
        return SimpleNamespace(eval_docs=[])


def engine(artifact: Path, weights: Any = "fp8", path: Any = "decode", **settings: Any) -> EngineCandidate:
    return EngineCandidate(Servable(artifact, "tiny-w4"), Configuration(weights, "bf16", path), **settings)


def test_records(artifact: Path) -> None:
    heard: list[Progress] = []
    run = run_tasks(engine(artifact), [CHOICE, CLOZE, ROLLING], on_progress=heard.append)
    assert [(i.task, i.item, i.cluster) for i in run.items] == [
        ("choice", "a", "x"), ("choice", "b", "x"), ("choice", "c", "y"), ("cloze", "1", "1"), ("cloze", "2", "2"),
        ("rolling", "r", "r"),
    ]  # fmt: skip
    assert all(i.values["acc"] in (0, 1) for i in run.items_of("choice"))
    (text,) = run.items_of("rolling")
    assert text.weights == {"word_perplexity": 10} and 20 < text.values["word_perplexity"] < 90
    assert all(i.values["perplexity"] > 0 and not i.weights for i in run.items_of("cloze"))
    assert len({i.prompt_sha256 for i in run.items}) == 6 and all(i.context_tokens > 2 for i in run.items)
    assert heard and heard[-1].share == 1 and heard[-1].done == heard[-1].total and heard[-1].eta_s == 0
    paths = {task.name: task.path for task in run.tasks}
    assert paths == {"choice": "decode", "cloze": "prefill", "rolling": "decode"}  # one token never enters decode
    tokens = run.candidate["scored_tokens"]
    assert tokens["cloze"] == {"tokens": 2, "decoded": 0}
    assert tokens["rolling"]["decoded"] == tokens["rolling"]["tokens"] - 1
    assert run.candidate["pair_id"] and run.candidate["configuration"]["path"] == "decode"


def test_decode_enters_decode_and_prefill_does_not(artifact: Path) -> None:
    """The INT4 weights show in figures of the decode path alone, FP8 figures are the same by both."""

    def value(weights: str, path: str, **settings: Any) -> float:
        run = run_tasks(engine(artifact, weights, path, **settings), [ROLLING])
        return run.items[0].values["word_perplexity"]

    fp8 = value("fp8", "prefill")
    assert value("dual", "prefill") == fp8
    assert value("fp8", "decode") == pytest.approx(fp8, rel=1e-3)
    dual = value("dual", "decode")
    assert dual != fp8 and dual == pytest.approx(fp8, rel=0.05)
    word = run_tasks(engine(artifact, "dual", decoded_context=1), [CLOZE])
    assert word.candidate["scored_tokens"]["cloze"] == {"tokens": 2, "decoded": 2}
    assert word.tasks[0].path == "decode"


def test_limit_takes_items_spread_over_the_task() -> None:
    docs = [{"id": n, "text": f"Number {n}", "target": " is"} for n in range(10)]
    run = run_tasks(Fake(), [cloze(*docs)], limit=3)
    assert [item.item for item in run.items] == ["0", "3", "6"]
    whole = run_tasks(Fake(), [cloze(*docs)])
    assert {item.item: item for item in whole.items}["3"] == run.items[1]


def test_what_is_too_long_is_said_and_not_cut() -> None:
    long = {"id": "long", "text": "word " * 80, "target": " is"}
    run = run_tasks(Fake(), [cloze({"id": "ok", "text": "A", "target": " is"}, long)])
    assert [item.item for item in run.items] == ["ok"]
    (skipped,) = run.tasks[0].skipped
    assert skipped.item == "long" and "tokens" in skipped.reason
    nothing = run_tasks(Fake(), [cloze(long)])  # that other tasks and candidates went through stands
    assert nothing.items == () and [one.item for one in nothing.tasks[0].skipped] == ["long"]
    assert nothing.tasks[0].path == Fake().path


def test_lengths_that_an_engine_refuses(artifact: Path) -> None:
    long = {"id": "long", "text": "word " * 2100, "target": " is"}
    ok = {"id": "ok", "text": "A", "target": "x"}
    run = run_tasks(engine(artifact), [cloze(ok, long)])
    assert "the model takes 2048" in run.tasks[0].skipped[0].reason
    (skipped,) = run_tasks(engine(artifact), [answering(ok, max_gen_toks=2048)]).tasks[0].skipped
    assert "tokens and an answer of 2048, there is room for 2048" in skipped.reason
    few = engine(artifact, kv_bytes=1 << 20)  # some 30 pages
    room = few.scorer().max_tokens
    text = {"id": "text", "text": "word " * 1000, "target": " is"}
    assert f"the KV pages hold {room}" in run_tasks(few, [cloze(ok, text)]).tasks[0].skipped[0].reason


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (cloze({"id": "e", "text": "A", "target": ""}), "task cloze, item e: has the empty continuation"),
        (cloze({"id": "e", "text": " \n", "target": "A"}), "task cloze, item e: has the context .* no token"),
        (rolling({"id": "e", "text": ""}), "task rolling, item e: has an empty text"),
        (answering({"id": "g", "text": "A", "target": "b"}, num_beams=4), "task answering, item g: .*'num_beams'"),
        (answering({"id": "g", "text": "A", "target": "b"}, top_p="big"), "item g: top_p is 'big'"),
        (
            Source("cloze", CLOZE.docs, CLOZE.settings, (Metric("f1", "mean", True),)),
            "no metric 'f1'; accepted: acc",
        ),
    ],
)
def test_what_can_not_be_scored(source: Source, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_tasks(Fake(), [source])


def test_tasks_that_are_not_there_or_twice() -> None:
    with pytest.raises(UsageError, match="cloze: the task has no items"):
        run_tasks(Fake(), [_Empty("cloze", (), (), ())])
    with pytest.raises(UsageError, match="no tasks"):
        run_tasks(Fake(), [])
    with pytest.raises(UsageError, match="cloze: the task is there twice"):
        run_tasks(Fake(), [CLOZE, CLOZE])
    with pytest.raises(UsageError, match="limit: is 0"):
        run_tasks(Fake(), [CLOZE], limit=0)


@pytest.mark.parametrize("value", [math.nan, -math.inf, "N/A", None])
def test_figures_that_are_not_numbers(value: Any) -> None:
    settings = dict(CLOZE.settings) | {"process_results": lambda doc, results: {"acc": value}}
    source = Source("cloze", CLOZE.docs, tuple(settings.items()), CLOZE.metrics[:1])
    with pytest.raises(ArtifactError, match=r"task cloze, item 1: acc is .*, not a number"):
        run_tasks(Fake(), [source])


@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_logits_that_are_not_numbers_name_the_item(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    candidate = engine(artifact, path=path)
    run = candidate.runner.run
    marked = candidate.tokenizer.encode(" room")[-1]

    def broken(batch: Any) -> torch.Tensor:
        logits = run(batch).clone()
        logits[:, marked] = torch.nan
        return logits

    monkeypatch.setattr(candidate.runner, "run", broken)
    with pytest.raises(
        ArtifactError, match=r"fp8, bf16 KV, task cloze, item [12]: the model's logits are not num"
    ):
        run_tasks(candidate, [CLOZE])


@pytest.mark.parametrize("what", ["scores", "answers"])
def test_a_tokenizer_of_another_model_names_the_item(artifact: Path, what: str) -> None:
    candidate = engine(artifact)
    candidate.tokenizer.add_tokens("<far>")
    text = {"id": "far", "text": "A <far>", "target": " <far>"}
    source = cloze(text) if what == "scores" else answering(text)
    with pytest.raises(UsageError, match=rf"task {source.name}, item far: .*has the token 4096\b"):
        run_tasks(candidate, [source])


def test_an_answer_that_fails_names_the_item(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = engine(artifact)
    run = candidate.runner.run
    monkeypatch.setattr(candidate.runner, "run", lambda batch: run(batch).clone().fill_(torch.nan))
    task = answering({"id": "a", "text": "Once upon", "target": "x"})
    with pytest.raises(
        ArtifactError, match="fp8, bf16 KV, task answering, item a: the model computed a logit that"
    ):
        run_tasks(candidate, [task])


def test_a_grammar_that_gives_up_names_the_item(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit_serve.engine.grammar import GrammarFailed

    def give_up(*arguments: Any) -> Any:
        raise GrammarFailed("gave up")

    monkeypatch.setattr("quantkit_serve.engine.engine.accept_all", give_up)
    with pytest.raises(UsageError, match="task answering, item a: gave up"):
        run_tasks(engine(artifact), [answering({"id": "a", "text": "Once upon", "target": "x"})])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_gen_toks": "many"}, "max_gen_toks is 'many'; accepted: a whole number from 1"),
        ({"max_gen_toks": [3]}, r"max_gen_toks is \[3\]"),
        ({"max_tokens": 2.7}, "max_tokens is 2.7"),
        ({"max_gen_toks": True}, "max_gen_toks is True"),
        ({"max_gen_toks": 0}, "max_gen_toks is 0"),
        ({"max_gen_toks": 10**400}, "max_gen_toks is 1000"),
        ({"top_k": math.inf}, "top_k is inf; accepted: a whole number from 0"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"temperature": math.nan}, "temperature is nan; accepted: a number, 0 or more"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"min_p": "x"}, "min_p is 'x'"),
        ({"do_sample": "false"}, "do_sample is 'false'; accepted: true or false"),
    ],
)
def test_generation_arguments_are_understood_or_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"here: {message}"):
        parse_generation(arguments, "here")


def test_sampled_answers_depend_on_the_seed_alone(artifact: Path) -> None:
    task = answering({"id": 1, "text": "Once upon", "target": "x"}, do_sample=True, temperature=1.5)
    assert parse_generation({"do_sample": True}, "t").temperature == 1
    assert parse_generation({"do_sample": False, "temperature": 0.7}, "t").temperature == 0
    candidate = engine(artifact)
    model = candidate.lm()
    instances = _instances(task) * 2
    first, again = model.generate_until(instances)
    assert first != again  # a repeated request is another draw
    assert engine(artifact).lm().generate_until(instances) == [first, again]


def _instances(source: Source) -> list[Any]:
    task = source.lm_eval_task()
    task.build_all_requests()
    return list(task.instances)


def test_chat_templates(artifact: Path) -> None:
    model = engine(artifact).lm()
    messages = [{"role": "user", "content": "Hello"}]
    expected = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert model.apply_chat_template(messages) == expected != "Hello"
    run = run_tasks(Fake(), [CLOZE], is_chat=True)
    assert run.settings["chat"] is True
    assert run.items[0].prompt_sha256 != run_tasks(Fake(), [CLOZE]).items[0].prompt_sha256
