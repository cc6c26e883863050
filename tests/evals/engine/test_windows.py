"""Texts longer than a model takes: windows decide the figure, so only texts that were cut alike compare."""

from __future__ import annotations

import pytest

from quantkit.errors import UsageError
from quantkit_evals.compare import compare
from quantkit_evals.harness.run_tasks import run_tasks
from quantkit_evals.session import Settings, evaluate
from tests.evals.engine.fake import Fake
from tests.evals.engine.small_tasks import cloze, rolling

TEXT = "They went down to the river, and there they found a boat which had been left by an old man. "
LONG = rolling({"id": "short", "text": TEXT}, {"id": "long", "text": TEXT * 6})


def test_other_windows_are_another_question() -> None:
    one, other = run_tasks(Fake("one"), [LONG]), run_tasks(Fake("other", max_length=40), [LONG])
    digests = [{item.item: item.prompt_sha256 for item in run.items} for run in (one, other)]
    assert digests[0]["short"] == digests[1]["short"] and digests[0]["long"] != digests[1]["long"]
    assert (one.settings["window"], other.settings["window"]) == (64, 40)
    with pytest.raises(
        UsageError, match=r"item long: the runs asked different prompts .* differ in window \(64, 40\)"
    ):
        compare(one, other)


def test_equal_windows_are_the_same_question_whoever_was_asked() -> None:
    one, other = run_tasks(Fake("one"), [LONG], window=40), run_tasks(Fake("other", max_length=40), [LONG])
    assert [item.prompt_sha256 for item in one.items] == [item.prompt_sha256 for item in other.items]
    assert one.settings == other.settings
    assert compare(one, other).metrics
    assert "window" not in run_tasks(Fake(), [cloze({"id": 1, "text": "A", "target": " is"})]).settings


def test_an_evaluation_takes_the_windows_that_all_can_take() -> None:
    report = evaluate(Fake("one"), [Fake("two", max_length=48), Fake("three", max_length=40)], Settings((LONG,)))
    for judged in report.judged:
        runs = judged.comparison.baseline, judged.comparison.candidate
        assert [run.settings["window"] for run in runs] == [40, 40]
        assert all(metric.num_items == 2 for metric in judged.comparison.metrics)


def test_the_windows_of_a_kept_run_are_taken() -> None:
    kept = run_tasks(Fake("kept", max_length=40), [LONG])
    (judged,) = evaluate(kept, [Fake("two")], Settings((LONG,))).judged
    assert judged.comparison.candidate.settings["window"] == 40
    with pytest.raises(UsageError, match=r"differ in window \(40, 32\)"):
        evaluate(kept, [Fake("two", max_length=32)], Settings((LONG,)))
