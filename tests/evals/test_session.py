"""One evaluation: what a suite asks for and a candidate can't give is left out and said, never refused late."""

from __future__ import annotations

import pytest

from quantkit.errors import UsageError
from quantkit_evals.candidates.fidelity_task import FidelityText
from quantkit_evals.gate import Gate
from quantkit_evals.report.gaps import gaps
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
