"""One evaluation: what a suite asks for and a candidate can't give is left out and said, never refused late."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from quantkit.errors import UsageError
from quantkit_evals.candidates.fidelity_task import FidelityText
from quantkit_evals.comparison import Verdict
from quantkit_evals.gate import Gate
from quantkit_evals.report.content import verdict_line
from quantkit_evals.report.gaps import gaps
from quantkit_evals.run import Run
from quantkit_evals.session import Settings, evaluate
from tests.evals.engine.fake import Fake
from tests.evals.engine.small_tasks import cloze

TASK = cloze(*({"id": n, "text": f"Number {n} and", "target": f" is {n}"} for n in range(4)))


def settings(**more: object) -> Settings:
    return Settings((TASK,), FidelityText(), **more)  # type: ignore[arg-type]


def test_fidelity_of_a_suite_is_left_out_where_there_are_no_logits() -> None:
    said: list[str] = []
    report = evaluate(Fake("one"), [Fake("two")], settings(is_fidelity_optional=True, limit=3), say=said.append)
    line = "task fidelity: it needs the logits of every token, which one does not give"
    assert line in said and report.judged[0].comparison.left_out == (line,)
    assert {metric.task for metric in report.judged[0].comparison.metrics} == {"cloze"}
    assert f"two: left out: {line}" in list(gaps(report))
    assert any("only 3 items of each task" in gap for gap in gaps(report))


def test_fidelity_that_was_named_or_is_judged_is_not_left_out() -> None:
    rule = {"metric": "fidelity.kl", "max": 1}
    gate = Gate.model_validate({"schema_version": 1, "name": "g", "rules": [rule]})
    for one in (settings(), settings(is_fidelity_optional=True, gate=gate)):
        with pytest.raises(UsageError, match="--task fidelity: it needs the logits of every token"):
            evaluate(Fake("one"), [Fake("two")], one)


def test_an_item_that_one_candidate_has_no_room_for_is_left_out_and_said() -> None:
    long = cloze(*({"id": n, "text": "word " * (20 * n) + "and", "target": " is"} for n in range(3)))
    report = evaluate(Fake("one"), [Fake("two", max_length=30)], Settings((long,)))
    (metric, *_) = report.judged[0].comparison.metrics
    assert metric.num_items == 2
    line = "task cloze: 1 item only in the baseline's run; 2 was skipped in the other: "
    assert any(line in gap for gap in gaps(report))


@dataclass(frozen=True)
class Named:
    """A task as gates see it, before it has run."""

    inner: Any
    paths = ("prefill", "decode")
    description = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.inner.name)
        object.__setattr__(self, "version", self.inner.version)
        object.__setattr__(self, "metrics", self.inner.lm_eval_task().metrics)

    def lm_eval_task(self) -> Any:
        return self.inner.lm_eval_task()


def short(name: str, *texts: str) -> Any:
    return Named(cloze(*({"id": n, "text": text, "target": " is"} for n, text in enumerate(texts)), name=name))


ONE = short("one", *(f"Number {n} and" for n in range(40)))
OTHER = short("other", *(f"Number {n} or" for n in range(40)))
LONG = short("long", *("word " * 60 + f"{n} and" for n in range(5)))


def gate(*rules: dict[str, object]) -> Gate:
    return Gate.model_validate({"schema_version": 1, "name": "g", "rules": list(rules)})


def kept(*tasks: Any, **more: Any) -> Run:
    report = evaluate(Fake("base"), [Fake("some")], Settings(tasks or (ONE,), **more))
    return report.judged[0].comparison.baseline


@pytest.mark.parametrize("metric", ["other.acc", "*.acc"])
def test_a_kept_run_without_what_the_gate_judges_is_refused_before_anything_runs(metric: str) -> None:
    said: list[str] = []
    rules = gate({"metric": "one.acc", "non_inferiority": 50}, {"metric": metric, "non_inferiority": 49})
    with pytest.raises(UsageError, match=r"gate g judges other\.acc, which the baseline's run does not have"):
        evaluate(kept(), [Fake("two")], Settings((ONE, OTHER), gate=rules), say=said.append)
    assert said == []
    reported = gate(
        {"metric": "one.acc", "non_inferiority": 99}, {"metric": "*", "min_recovery": 1, "required": False}
    )
    report = evaluate(kept(), [Fake("two")], Settings((ONE, OTHER), gate=reported))
    assert any("task other: only the candidate has it" in line for line in gaps(report))
    assert "; 1 task left out" in verdict_line(report)


@pytest.mark.parametrize(
    ("settings", "message"), [({"seed": 3}, "seed 0, this evaluation 3"), ({"is_chat": True}, "chat")]
)
def test_a_kept_run_that_was_asked_otherwise_is_refused_before_anything_runs(
    settings: dict[str, Any], message: str
) -> None:
    said: list[str] = []
    with pytest.raises(UsageError, match=message):
        evaluate(kept(), [Fake("two")], Settings((ONE,), **settings), say=said.append)
    assert said == []


def test_a_candidate_without_room_for_a_task_stops_nobody_and_passes_no_gate() -> None:
    rules = gate({"metric": "one.acc", "non_inferiority": 99}, {"metric": "long.acc", "non_inferiority": 99})
    patterns = gate({"metric": "*.acc", "non_inferiority": 99})
    for one in (rules, patterns):
        report = evaluate(
            Fake("base"), [Fake("wide"), Fake("narrow", max_length=30)], Settings((ONE, LONG), gate=one)
        )
        wide, narrow = report.judged
        assert wide.gate.verdict is not Verdict.FAIL and len(wide.comparison.metrics) == 4
        assert narrow.gate.verdict is Verdict.UNDECIDED
        (missing,) = [rule for rule in narrow.gate.rules if rule.name == "long.acc"]
        assert missing.verdict is Verdict.UNDECIDED and "no item of the task was scored" in missing.advice
        assert any("task long: no item was scored in both runs" in line for line in gaps(report))
    alone = evaluate(Fake("base"), [Fake("narrow", max_length=30)], Settings((LONG,), gate=patterns))
    assert not alone.is_success


def test_patterns_that_judge_fidelity_keep_it() -> None:
    for rule in ({"metric": "*.kl", "max": 1}, {"metric": "*.top1_*", "min": 1}):
        with pytest.raises(UsageError, match="--task fidelity: it needs the logits"):
            evaluate(Fake("one"), [Fake("two")], settings(is_fidelity_optional=True, gate=gate(rule)))
    reported = gate({"metric": "one.acc", "min": 0}, {"metric": "*", "min_recovery": 9, "required": False})
    asked = replace(settings(is_fidelity_optional=True, gate=reported), tasks=(ONE,))
    assert evaluate(Fake("one"), [Fake("two")], asked).judged


def test_a_margin_is_the_gates_everywhere() -> None:
    rules = gate({"metric": "*.acc", "non_inferiority": 99}, {"metric": "*", "min_recovery": 1, "required": False})
    report = evaluate(Fake("base"), [Fake("two")], Settings((ONE,), gate=rules, margin=0.001))
    (found,) = [metric for metric in report.judged[0].comparison.metrics if metric.name == "one.acc"]
    (rule,) = [rule for rule in report.judged[0].rules("one.acc") if rule.is_required]
    assert (found.non_inferiority.margin, found.non_inferiority.verdict) == (0.99, rule.verdict)
