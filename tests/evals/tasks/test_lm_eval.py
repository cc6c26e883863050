"""Task objects as lm-eval runs them: requests and scores of a model whose answers are known, without a network."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate

from quantkit_evals.tasks import answers, find_tasks


class Known(LM):
    """A continuation's log-likelihood is minus its characters, ``good`` ones are greedy; it answers as told."""

    def __init__(self, *told: str) -> None:
        super().__init__()
        self.told, self.asked = list(told), []

    def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
        self.asked += [request.args for request in requests]
        return [(-float(len(args[1])), "good" in args[1]) for args in (request.args for request in requests)]

    def loglikelihood_rolling(self, requests: Any) -> list[float]:
        return [-3.0 * len(request.args[0].split()) for request in requests]

    def generate_until(self, requests: Any) -> list[str]:
        self.asked += [request.args for request in requests]
        return self.told[: len(requests)]


@pytest.fixture(autouse=True)
def nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a task of ours opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def run(tmp_path: Path, yaml: str, rows: list[dict[str, Any]], *told: str) -> tuple[Known, dict[str, Any], Any]:
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.yaml").write_text(f"data: mine.jsonl\n{yaml}")
    (source,) = find_tasks([str(tmp_path / "mine.yaml")])
    model, task = Known(*told), source.lm_eval_task()
    found = evaluate(model, {"tasks": {"mine": task}, "groups": {}}, bootstrap_iters=0, log_samples=True)
    assert task.metrics == source.metrics
    samples = sorted(found["samples"]["mine"], key=lambda sample: sample["doc_id"])
    assert [task.item_id(sample["doc"]) for sample in samples] == [
        str(row.get("id", n)) for n, row in enumerate(rows, 1)
    ]
    return model, found["results"]["mine"], samples


def test_choice(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "context": "C", "choices": ["longer", "sh"], "answer": 1},  # the shorter one is likelier
        {"id": "b", "context": "D", "choices": ["longer", "sh"], "answer": 0},
    ]
    model, results, samples = run(tmp_path, "kind: choice\n", rows)
    assert model.asked == [("C", " longer"), ("C", " sh"), ("D", " longer"), ("D", " sh")]
    assert results["acc,none"] == 0.5
    # per character: -7/6 of "longer" against -3/2 of "sh"
    assert [sample["acc_norm"] for sample in samples] == [0.0, 1.0]


def test_mutual_information_asks_for_each_choice_alone(tmp_path: Path) -> None:
    rows = [{"context": "C", "choices": ["a", "b"], "answer": 1}]
    model, _, _ = run(tmp_path, "kind: choice\nmetrics: [acc_mutual_info]\n", rows)
    assert model.asked == [("C", " a"), ("C", " b"), ("", " a"), ("", " b")]


def test_cloze(tmp_path: Path) -> None:
    rows = [{"context": "is it", "target": "good"}, {"context": "is it", "target": "bad"}]
    model, results, samples = run(tmp_path, "kind: cloze\n", rows)
    assert model.asked == [("is it", " good"), ("is it", " bad")]
    assert results["acc,none"] == 0.5
    assert [sample["perplexity"] for sample in samples] == [-5.0, -4.0]  # log-likelihoods, as lm-eval has them


def test_a_delimiter_of_ones_own(tmp_path: Path) -> None:
    model, _, _ = run(tmp_path, "kind: cloze\ndelimiter: ''\n", [{"context": "is", "target": "n't"}])
    assert model.asked == [("is", "n't")]


def test_perplexity(tmp_path: Path) -> None:
    _, results, samples = run(tmp_path, "kind: perplexity\n", [{"text": "a b"}, {"text": "c d e"}])
    assert [sample["word_perplexity"] for sample in samples] == [(-6.0, 2), (-9.0, 3)]
    assert [sample["byte_perplexity"][1] for sample in samples] == [3, 5]
    assert results["word_perplexity,none"] == pytest.approx(2.718281828459045**3)


def test_text_that_looks_like_a_template_or_a_list_is_text(tmp_path: Path) -> None:
    rows = [{"context": "{{id}} {% x", "target": "['a']"}]
    model, _, _ = run(tmp_path, "kind: cloze\n", rows)
    assert model.asked == [("{{id}} {% x", " ['a']")]


def test_generate_with_a_schema(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "required": ["a"],
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    }
    rows = [{"prompt": f"P{n}", "json_schema": schema, "target": {"a": 1, "b": True}} for n in range(4)]
    told = (' {"a": 1.0, "b": true}', '{"a": 1, "b": 1}', '{"a": 1} and more', '{"a": 2, "b": true}')
    model, results, samples = run(
        tmp_path, "kind: generate\nmax_tokens: 9\nmetrics: [valid, exact_match, field_match]\n", rows, *told
    )
    prompt, arguments = model.asked[0]
    assert (prompt, json.loads(arguments["json_schema"]), arguments["max_gen_toks"]) == ("P0", schema, 9)
    assert arguments["json_schema"].index("required") < arguments["json_schema"].index("properties")  # as written
    assert arguments["until"] == ["\n"]
    assert [sample["valid"] for sample in samples] == [1, 0, 0, 1]
    assert [sample["exact_match"] for sample in samples] == [1, 0, 0, 0]
    assert [sample["field_match"] for sample in samples] == [1, 0.5, 0, 0.5]
    assert results["valid,none"] == 0.5


def test_generate_a_text(tmp_path: Path) -> None:
    rows = [{"prompt": "P", "target": "two"}, {"prompt": "P", "target": "2"}]
    model, results, _ = run(tmp_path, "kind: generate\nuntil: ['.']\n", rows, " two ", "two")
    assert results["exact_match,none"] == 0.5
    assert "json_schema" not in model.asked[0][1]
    assert model.asked[0][1]["until"] == ["."]


@pytest.mark.parametrize(
    ("answer", "valid"),
    [("", 0.0), ("null", 0.0), ("[1]", 0.0), ('{"a": 1}', 1.0), ('{"a": 1', 0.0), ("{" * 9999, 0.0), ('"a"', 0.0)],
)
def test_validity(answer: str, valid: float) -> None:
    assert answers.score({"json_schema": {"type": "object"}}, answer) == {"valid": valid}


@pytest.mark.parametrize(
    "answer",
    ['"\\ud83d"', '{"b": "\\ud83d"}', '{"\\ud83d": 1}', '{"b": NaN}', '{"b": -Infinity}', "1e999", "[" * 900],
)
def test_what_python_reads_and_json_is_not(answer: str) -> None:
    """Half of a surrogate pair ended an evaluation, and again whenever it went on from what was kept."""
    assert answers.score({"json_schema": {}, "target": {"b": 1}}, answer)["valid"] == 0


def test_fields_are_counted_at_any_depth() -> None:
    item = {"json_schema": {}, "target": {"tool": "t", "arguments": {"x": 1, "y": [1, True]}}}
    assert answers.score(item, '{"tool": "t", "arguments": {"x": 2, "y": [1, true]}}')["field_match"] == 2 / 3
    assert answers.score(item, '{"tool": "t", "arguments": {"x": true, "y": [1, 1]}}')["field_match"] == 1 / 3
    assert answers.score(item, "[]")["field_match"] == 0


def test_nothing_is_written_to_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for source in find_tasks([], suite="quick"):
        source.lm_eval_task().build_all_requests(limit=1)
    assert not (tmp_path / "cache").exists()
