"""The bundled tasks: made again byte for byte, of held-out text only, within the budget of `quick`."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from quantkit.data import bundled_model, bundled_text
from quantkit_evals.tasks import find_tasks, suite_names, task_names
from tools.eval_tasks.__main__ import FOLDER, MAKERS, render

CHOICES = ("next_sentence", "copy", "copy_long")


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def plain(text: str) -> str:
    return " ".join(text.split())


HELDOUT = plain(bundled_text("heldout").read_text(encoding="utf-8"))
CALIB = bundled_text("calib").read_text(encoding="utf-8")


def texts(name: str, row: dict) -> list[str]:
    """What of an item was taken from a text."""
    if name == "structured":
        return [row["prompt"].removeprefix("Text: ").split("\n\n")[0]]
    if name == "cloze":
        return [f"{row['context']} {row['target']}"]
    if name == "tool_calls":
        return []
    return [row.get("text", ""), *row.get("choices", ())] + ([row["context"]] if "context" in row else [])


@pytest.mark.parametrize("name", MAKERS)
def test_made_again_they_are_the_same_bytes(name: str) -> None:
    assert render(name) == (FOLDER / f"{name}.jsonl").read_bytes()


@pytest.mark.parametrize("name", MAKERS)
def test_no_text_is_in_the_calibration_text(name: str) -> None:
    def runs(text: str) -> set[str]:
        words = re.sub(r"[^a-z0-9' ]+", " ", plain(text).lower()).split()
        return {" ".join(words[k : k + 8]) for k in range(len(words) - 7)}

    known = runs(CALIB)
    assert len(known) > 40_000
    for row in rows(name):
        for text in texts(name, row):
            assert not runs(text) & known, row["id"]


@pytest.mark.parametrize("name", MAKERS)
def test_all_text_is_held_out(name: str) -> None:
    for row in rows(name):
        for text in texts(name, row):
            if name.startswith("copy") and text == row["context"]:  # passages one after the other
                text = " ".join(text.split()[:60])
            assert text in HELDOUT, row["id"]


def test_the_next_sentence_is_next_and_the_others_are_not() -> None:
    for row in rows("next_sentence"):
        follows = [f"{row['context']} {choice}" in HELDOUT for choice in row["choices"]]
        assert [k for k, yes in enumerate(follows) if yes] == [row["answer"]], row["id"]


@pytest.mark.parametrize("name", ["copy", "copy_long"])
def test_one_sentence_stands_at_the_beginning(name: str) -> None:
    for row in rows(name):
        at = [row["context"].find(choice) for choice in row["choices"]]
        assert 0 <= at[row["answer"]] < 200
        assert [k for k, place in enumerate(at) if place >= 0] == [row["answer"]], row["id"]


@pytest.mark.parametrize("name", CHOICES)
def test_no_answer_can_be_guessed_from_its_place_or_length(name: str) -> None:
    items = rows(name)
    places = Counter(row["answer"] for row in items)
    assert set(places) == {0, 1, 2, 3}
    assert max(places.values()) < 0.25 * len(items) + 3 * (0.1875 * len(items)) ** 0.5
    for pick in (min, max):
        right = sum(pick(range(4), key=lambda k: len(row["choices"][k])) == row["answer"] for row in items)
        assert right < 0.25 * len(items) + 4 * (0.1875 * len(items)) ** 0.5


def test_the_last_word_is_in_the_context_and_no_word_is_wanted_too_often() -> None:
    items = rows("cloze")
    assert len(items) >= 2500
    assert len({row["cluster"] for row in items}) > 300
    for row in items:
        assert re.search(rf"\b{row['target']}\b", row["context"], re.IGNORECASE), row["id"]
    assert max(Counter(row["target"].lower() for row in items).values()) <= 100


def test_quick_is_within_its_budget() -> None:
    """In tokens of the bundled models: continuations that are scored, and requests."""
    tokenizer = Tokenizer.from_file(str(bundled_model("tiny-glm") / "tokenizer.json"))
    scored = requests = 0
    for task in find_tasks([], suite="quick"):
        task.lm_eval_task()
        for item in task.items:  # type: ignore[attr-defined]
            asked = item.get("choices") or [item.get("target") or item.get("text")]
            if "prompt" in item:
                scored, requests = scored + task.definition.max_tokens, requests + 1  # type: ignore[attr-defined]
                continue
            times = 2 if "acc_mutual_info" in (task.definition.metrics or ()) else 1  # type: ignore[attr-defined]
            requests += times * len(asked)
            scored += times * sum(len(tokenizer.encode(f" {text}").ids) for text in asked)
    assert requests <= 60_000
    assert scored <= 150_000


def test_the_folder_is_small_and_every_file_belongs_to_a_task() -> None:
    files = {path.name for path in Path(FOLDER).iterdir()}
    assert files == {f"{name}.{ending}" for name in MAKERS for ending in ("yaml", "jsonl")} | {"suites.yaml"}
    assert sum(path.stat().st_size for path in Path(FOLDER).iterdir()) < 3_000_000
    assert task_names() == sorted(MAKERS)
    assert suite_names() == ["quick", "standard", "tools"]


def test_longest_items_fit_the_bundled_models() -> None:
    tokenizer = Tokenizer.from_file(str(bundled_model("tiny-glm") / "tokenizer.json"))
    longest = max(
        len(tokenizer.encode(f"{row['context']} {choice}").ids)
        for row in rows("copy_long")
        for choice in row["choices"]
    )
    assert 1200 < longest <= 2048
