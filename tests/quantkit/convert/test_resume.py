"""Killed at any point and run again, a conversion gives the bytes of an undisturbed one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantkit.artifact import verify_artifact
from quantkit.artifact.layout import JOURNAL
from quantkit.convert import Progress
from quantkit.errors import ArtifactError, EnvironmentProblem, Interrupted
from tests.builders import write_moe
from tests.quantkit.convert.cases import core_digests, run

ROOT = Path(__file__).parents[3]
POINTS, DELAYS = 20, 6


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("source") / "model", "glm_moe_dsa")


def test_kill_at_any_point(source: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.quantkit.convert.crash_driver", source, tmp_path, "20",
            str(POINTS), str(DELAYS),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (_, _, undisturbed), *results = json.loads(done.stdout)
    assert len(results) == POINTS + DELAYS
    killed = [kills for _, kills, _ in results]
    assert sum(kills > 0 for kills in killed) >= 20, killed
    for what, _, digests in results:
        assert "partial left: False" in what
        assert digests == undisturbed, what
    assert verify_artifact(tmp_path / "run-0").ok


class StopAfter:
    """Progress callback that behaves like Ctrl-C (or another error) at the n-th event."""

    def __init__(self, events: int, problem: BaseException) -> None:
        self.left, self.problem = events, problem

    def __call__(self, event: Progress) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.problem


@pytest.mark.parametrize("events", [2, 9, 30])
def test_error_in_a_worker_is_resumable(source: Path, tmp_path: Path, events: int) -> None:
    run(source, tmp_path / "whole")
    with pytest.raises(RuntimeError, match="callback"):
        run(source, tmp_path / "out", on_progress=StopAfter(events, RuntimeError("callback")))
    assert not (tmp_path / "out").exists()
    run(source, tmp_path / "out", jobs=1)
    assert core_digests(tmp_path / "out") == core_digests(tmp_path / "whole")


def test_interrupt_says_how_to_resume_and_keeps_what_is_done(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.convert import executor

    class Impatient(executor.Crew[executor.Unit]):
        def run(self, workers: int) -> None:
            done = list(self._units)[: len(self._units) // 2]
            for unit in done:
                self._work(self._units.popleft() or unit)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(executor, "Crew", Impatient)
        patch.setattr(executor, "BATCH_BYTES", 24 << 10)
        with pytest.raises(Interrupted, match="resumes") as caught:
            run(source, tmp_path / "out")
    assert caught.value.exit_code == 130
    journal = (tmp_path / "out.partial" / JOURNAL).read_text().splitlines()
    before = sum(len(json.loads(line).get("done", ())) for line in journal)
    assert before > 0
    first: list[Progress] = []
    run(source, tmp_path / "out", on_progress=first.append)
    assert first[0].done_bytes > 0  # what was done is not done again
    run(source, tmp_path / "whole")
    assert core_digests(tmp_path / "out") == core_digests(tmp_path / "whole")


def test_ctrl_c_from_a_terminal(source: Path, tmp_path: Path) -> None:
    """A real SIGINT to a real process, in the middle of a slowed-down run."""
    code = (
        "import sys, time, signal, os\n"
        "from pathlib import Path\n"
        "from quantkit.errors import Interrupted\n"
        "from tests.quantkit.convert.cases import run\n"
        "def slow(event):\n"
        "    if event.done_bytes > event.total_bytes // 4: print('ready', flush=True)\n"
        "    time.sleep(0.02)\n"
        "try: run(Path(sys.argv[1]), Path(sys.argv[2]), on_progress=slow)\n"
        "except Interrupted as stop: print(stop.hint); sys.exit(stop.exit_code)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, source, tmp_path / "out"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    child.send_signal(2)
    said, _ = child.communicate(timeout=30)
    assert child.returncode == 130 and "resumes where it stopped" in said
    run(source, tmp_path / "out")
    assert verify_artifact(tmp_path / "out").ok


def test_damaged_unfinished_shard_is_written_again(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "whole")
    with pytest.raises(RuntimeError):
        run(source, tmp_path / "out", jobs=1, on_progress=StopAfter(60, RuntimeError("stop")))
    unfinished = list((tmp_path / "out.partial" / "decode").glob("*.unfinished"))
    for path in unfinished:
        data = bytearray(path.read_bytes())
        data[len(data) // 3 :] = bytes(len(data) - len(data) // 3)
        path.write_bytes(data)
    assert unfinished
    run(source, tmp_path / "out")
    assert core_digests(tmp_path / "out") == core_digests(tmp_path / "whole")


def stopped(source: Path, out: Path, **options: Any) -> Path:
    with pytest.raises(RuntimeError):
        run(source, out, jobs=1, on_progress=StopAfter(40, RuntimeError("stop")), **options)
    return out.with_name(out.name + ".partial")


def test_foreign_work_is_not_continued(source: Path, tmp_path: Path) -> None:
    stopped(source, tmp_path / "out")
    with pytest.raises(ArtifactError, match="another plan") as caught:
        run(source, tmp_path / "out", method="mse")
    assert "delete the directory" in str(caught.value)
    other = write_moe(tmp_path / "other", "glm_moe_dsa", seed=7, hidden=256, experts=3)
    with pytest.raises(ArtifactError, match="another plan and another source"):
        run(other, tmp_path / "out")


def test_torn_journal_line_is_dropped(source: Path, tmp_path: Path) -> None:
    work = stopped(source, tmp_path / "out")
    with open(work / JOURNAL, "ab") as handle:
        handle.write(b'{"kind":"jobs","shard":"decode/model-la')
    run(source, tmp_path / "out")
    assert verify_artifact(tmp_path / "out").ok


def test_two_runs_never_share_a_directory(source: Path, tmp_path: Path) -> None:
    inner: list[BaseException] = []

    def second(event: Progress) -> None:
        if not inner:
            inner.append(RuntimeError())  # placeholder: the callback is called again by the second run
            with pytest.raises(EnvironmentProblem, match="another quantkit process") as caught:
                run(source, tmp_path / "out")
            inner.append(caught.value)

    run(source, tmp_path / "out", on_progress=second)
    assert isinstance(inner[-1], EnvironmentProblem)


def test_stale_files_of_an_earlier_run_are_swept(source: Path, tmp_path: Path) -> None:
    work = stopped(source, tmp_path / "out")
    (work / "decode" / "stale.safetensors").write_bytes(b"old")
    (work / "prefill" / "deep").mkdir()
    (work / "prefill" / "deep" / "stale.json").write_bytes(b"{}")
    run(source, tmp_path / "out")
    assert verify_artifact(tmp_path / "out").ok
    assert not (tmp_path / "out" / "prefill" / "deep").exists()
