"""Answers are kept: found again by content, after a kill too; and folders that can't keep any."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quantkit.errors import ArtifactError, EnvironmentProblem
from quantkit_evals.candidates.engine import EngineCandidate
from quantkit_evals.configuration import Configuration
from quantkit_evals.harness.cache import FILE, ResponseCache, check_cache, default_cache
from quantkit_evals.harness.run_tasks import run_tasks
from quantkit_serve.start.servable import Servable
from tests.evals.engine.fake import Fake
from tests.evals.engine.small_tasks import answering, cloze

DOCS = [{"id": n, "text": f"Number {n} and", "target": f" is {n}"} for n in range(40)]
TASKS = [cloze(*DOCS), answering(*DOCS[:5])]


def test_after_kill_9_the_result_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit_evals.harness.cache._HELD", 4)
    if not (child := os.fork()):
        run_tasks(Fake(on_pair=lambda count: os.kill(os.getpid(), signal.SIGKILL) if count == 30 else None),
                  TASKS, cache=tmp_path)  # fmt: skip
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    again = Fake()
    found = run_tasks(again, TASKS, cache=tmp_path)
    assert found == run_tasks(Fake(), TASKS)
    assert again.num_computed <= 45 - 30 + 4  # the last group at most
    third = Fake()
    assert run_tasks(third, TASKS, cache=tmp_path) == found and third.num_computed == 0


def test_equal_requests_are_computed_once_and_other_candidates_answer_themselves(tmp_path: Path) -> None:
    candidate = Fake()
    run_tasks(candidate, [cloze(*(dict(doc, text="The same", target=" word") for doc in DOCS))], cache=tmp_path)
    assert candidate.num_computed == 1
    other = Fake()
    other.identity = lambda: {"label": "fake", "kind": "another"}  # type: ignore[method-assign]
    run_tasks(other, TASKS, cache=tmp_path)
    assert other.num_computed == 45
    renamed = Fake("another label")
    run_tasks(renamed, TASKS[:1], cache=tmp_path)
    assert renamed.num_computed == 40  # of the first candidate's only one is there
    run_tasks(again := Fake("a third label"), TASKS[:1], cache=tmp_path)
    assert again.num_computed == 0


def test_answers_of_files_that_were_changed_are_made_again(artifact: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(artifact, tmp_path / "copy")
    model = EngineCandidate(Servable(changed, "m"), Configuration("dual"))
    before, stated = model.state(), model.identity()
    (changed / "attachments").mkdir(exist_ok=True)
    (changed / "attachments" / "note").write_text("not of the model")
    assert model.state() == before
    weights = next((changed / "decode").glob("*.safetensors"))
    os.utime(weights, ns=(0, 0))
    assert model.state() != before and model.identity() == stated  # its manifest says what it said

    kept = Fake()
    run_tasks(kept, TASKS[:1], cache=tmp_path)
    other = Fake()
    other.state = model.state  # type: ignore[method-assign]
    run_tasks(other, TASKS[:1], cache=tmp_path)
    assert other.num_computed == 40


def test_what_was_done_before_an_error_is_kept(tmp_path: Path) -> None:
    def fail(count: int) -> None:
        if count == 20:
            raise EnvironmentProblem("the endpoint has gone")

    with pytest.raises(EnvironmentProblem, match="20 of 40 answers are kept"):
        run_tasks(Fake(on_pair=fail), TASKS[:1], cache=tmp_path)
    with pytest.raises(EnvironmentProblem, match=r"gone$"):
        run_tasks(Fake(on_pair=fail), TASKS[:1])
    rest = Fake()
    run_tasks(rest, TASKS[:1], cache=tmp_path)
    assert rest.num_computed == 20


def test_folders_that_keep_nothing(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"something else, " * 100)
    with pytest.raises(ArtifactError, match="is not a file of kept answers"):
        ResponseCache(tmp_path, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="answers can't be kept here"):
        ResponseCache(tmp_path / "file" / "below", {})


def test_a_file_that_can_only_be_read_says_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ResponseCache(tmp_path, {}).flush()
    connect = sqlite3.connect
    monkeypatch.setattr(  # root writes where nobody else may
        "sqlite3.connect", lambda path, **more: connect(f"file:{path}?mode=ro", uri=True, **more)
    )
    with pytest.raises(EnvironmentProblem, match=r"can't be kept here.*readonly.*--no-cache"):
        check_cache(tmp_path)
    check_cache(None)


@pytest.mark.parametrize("kept", ["{", '"text"', "[1.0]", "[null, true, 1]"])
def test_answers_that_are_none_are_no_figures(kept: str, tmp_path: Path) -> None:
    run_tasks(Fake(), TASKS[:1], cache=tmp_path)
    with sqlite3.connect(tmp_path / FILE) as base:
        base.execute("UPDATE answers SET answer = ?", (kept,))
    with pytest.raises(ArtifactError, match=r"is not a file of kept answers.*Delete it"):
        run_tasks(Fake(), TASKS[:1], cache=tmp_path)


def test_a_file_damaged_in_its_middle(tmp_path: Path) -> None:
    run_tasks(Fake(), TASKS[:1], cache=tmp_path)
    with sqlite3.connect(tmp_path / FILE) as base:
        base.execute("PRAGMA journal_mode = DELETE")
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data[:4096] + b"\xa5" * (len(data) - 4096))
    with pytest.raises(ArtifactError, match="is not a file of kept answers"):
        run_tasks(Fake(), TASKS[:1], cache=tmp_path)


def test_several_begin_a_file_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for found in [pool.submit(check_cache, tmp_path / str(n // 8)) for n in range(80)]:
            found.result()


def test_the_default_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "quantkit" / "evals"


def test_keys_are_of_content() -> None:
    cache = ResponseCache(None, {"label": "a", "model": 1})
    same = ResponseCache(None, {"model": 1, "label": "b"})
    assert cache.key("score", [(1, 2), (3,)]) == same.key("score", json.loads("[[1, 2], [3]]"))
    keys = {
        cache.key(*request)
        for request in (("score", [1]), ("generate", [1]), ("score", [2]), ("score", ["\ud800"]))
    }
    assert len(keys) == 4 and cache.key("score", [1]) != ResponseCache(None, {"model": 2}).key("score", [1])
