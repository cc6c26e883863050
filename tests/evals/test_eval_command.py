"""``quantkit eval`` on the bundled model: from a command line to a verdict, files and attachments."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.artifact import Artifact, verify_artifact
from quantkit.cli.main import main
from quantkit.errors import EnvironmentProblem
from quantkit_evals.run_file import read_run

Result = tuple[int, str, str]

TASK = "kind: choice\ndata: mine.jsonl\ndescription: which word follows\n"
LINES = (
    '{"context": "Once upon a time there was a", "choices": [" king", " the"], "answer": 0}\n'
    '{"context": "He went to the house of the", "choices": [" old man", " were"], "answer": 0}\n'
    '{"context": "The sun was in the", "choices": [" sky", " of"], "answer": 0}\n'
)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("eval") / "tiny-w4"
    quantkit.convert(quantkit.plan("tiny-glm", method="rtn"), target).close()
    return target


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.jsonl").write_text(LINES)
    (tmp_path / "mine.yaml").write_text(TASK)
    return tmp_path / "mine.yaml"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Result:
    capsys.readouterr()
    code = main(["eval", *map(str, arguments)])
    return code, *capsys.readouterr()


def gate(folder: Path, *rules: str) -> Path:
    path = folder / "gate.yaml"
    path.write_text("schema_version: 1\nname: test\nrules:\n" + "".join(f"  - {{{rule}}}\n" for rule in rules))
    return path


def test_from_a_command_line_to_a_verdict(
    artifact: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    core = (artifact / "manifest.json").read_bytes()
    out = tmp_path / "out"
    code, text, err = run(
        capsys, artifact, "--task", mine, "--weights", "dual", "--weights", "int4", "--kv-dtype", "fp8",
        "--gate", gate(tmp_path, "metric: mine.acc, min_recovery: 1"), "--output", out, "--json",
        "--html", tmp_path / "r.html", "--junit", tmp_path / "r.xml", "--markdown", tmp_path / "r.md",
    )  # fmt: skip
    document = json.loads(text)
    assert document["outcome"] in ("pass", "undecided") and document["success"] is (code == 0), err
    assert document["baseline"]["candidate"]["configuration"]["weights"] == "fp8"
    assert document["baseline"]["candidate"]["configuration"]["kv_dtype"] == "bf16"
    assert [one["label"] for one in document["candidates"]] == ["dual, fp8 KV", "int4, fp8 KV"]
    assert {task["path"] for one in document["candidates"] for task in one["tasks"]} == {"decode"}
    for name in ("baseline", "dual-fp8-kv", "int4-fp8-kv"):
        assert len(read_run(out / name).items) == 3
    written = ("out/report.html", "out/junit.xml", "r.html", "r.xml", "r.md")
    for path in (tmp_path / name for name in written):
        assert path.stat().st_size > 500
    assert "mine.acc" in (tmp_path / "summary.md").read_text()
    assert "::" in err and "::" not in text.splitlines()[0]  # stdout is the document's
    folders = sorted(path.name.rpartition("-")[0] for path in (artifact / "attachments" / "evals").iterdir())
    assert folders == ["dual-fp8-kv", "fp8-bf16-kv", "int4-fp8-kv"]
    assert (artifact / "manifest.json").read_bytes() == core
    with Artifact.open(artifact):
        assert verify_artifact(artifact).ok

    code, text, err = run(capsys, "compare", out / "baseline", out / "int4-fp8-kv")
    assert code == 0 and "MEASURED" in text.splitlines()[-1], err


def test_a_gate_that_fails_is_exit_code_1(
    artifact: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code, text, _ = run(capsys, artifact, "--task", mine, "--no-attach", "-o", out, "--seed", "1",
                        "--gate", gate(tmp_path, "metric: mine.acc, min: 1000"))  # fmt: skip
    assert code == 1 and text.splitlines()[-1].startswith("FAILED")
    tight = gate(tmp_path, "metric: mine.acc, non_inferiority: 0.1")
    compared = ("compare", out / "baseline", out / "dual-fp8-kv", "--gate", tight)
    code, text, _ = run(capsys, *compared)
    assert code == 1 and text.splitlines()[-1].startswith("UNDECIDED")
    code, text, _ = run(capsys, *compared, "--undecided", "pass")
    assert code == 0 and "UNDECIDED" in text.splitlines()[-1]


@pytest.mark.parametrize("form", ["--json", "--quiet"])
def test_a_file_that_fails_in_the_end_does_not_take_the_verdict_along(
    form: str, artifact: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("quantkit.artifact.durable.write_file", full)
    code, text, err = run(capsys, artifact, "--task", mine, "--no-attach", "--html", tmp_path / "r.html", form,
                          "--gate", gate(tmp_path, "metric: mine.acc, min: 1000"))  # fmt: skip
    assert err.count("error:") == 1 and "r.html" in err and "no space left" in err
    assert code == 1  # what the gate says: 4 would mean that nothing was judged
    said = json.loads(text)["verdict"] if form == "--json" else text.splitlines()[-1]
    assert said.startswith("FAILED")
    code, text, err = run(capsys, artifact, "--task", mine, "--no-attach", "--html", tmp_path / "r.html", form)
    assert code == 4 and err.count("error:") == 1 and "MEASURED" in text


def test_runs_that_can_not_be_kept_take_no_verdict_along(
    artifact: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def full(*_: Any, **__: Any) -> None:
        raise EnvironmentProblem("no space left on device", where="out")

    monkeypatch.setattr("quantkit_evals.report.keep.keep", full)
    monkeypatch.setattr("quantkit_evals.report.attach.attach", full)
    failing = gate(tmp_path, "metric: mine.acc, min: 1000")
    ask = (artifact, "--task", mine, "-o", tmp_path / "out", "--junit", tmp_path / "r.xml")
    code, text, err = run(capsys, *ask, "--gate", failing)
    assert code == 1 and text.splitlines()[-1].startswith("FAILED")
    assert err.count("error: out: no space left on device") == 2
    assert (tmp_path / "r.xml").exists()  # the others are tried all the same
    assert run(capsys, *ask)[0] == 4


def refused(result: Result, code: int, *words: str) -> None:
    assert result[0] == code, result
    assert all(word in result[2] for word in words), result[2]
    assert result[2].count("error:") == 1 and "Traceback" not in result[2]


def test_what_is_refused_before_anything_runs(
    artifact: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("quantkit_serve.model.runner.open_runner", never)
    good = gate(tmp_path, "metric: mine.acc, min_recovery: 99")
    ask = (artifact, "--task", mine, "--no-attach")
    refused(run(capsys, *ask, "--gate", "defualt"), 2, "defualt", "default")
    refused(run(capsys, *ask, "--gate", gate(tmp_path, "metric: mine.accc, min_recovery: 9")), 2, "mine.acc")
    gate(tmp_path, "metric: mine.acc, min_recovery: 99")
    refused(run(capsys, *ask, "--gate", good, "--path", "prefill"), 2, "never enters decode")
    refused(run(capsys, *ask, "--weights", "fp8", "--kv-dtype", "bf16"), 2, "--weights", "is the baseline itself")
    refused(run(capsys, artifact, "--task", "no_such_task"), 2, "no_such_task")
    refused(run(capsys, artifact, "--suite", "quik"), 2, "quik", "quick")
    refused(run(capsys, *ask, "--html", tmp_path / "no" / "r.html"), 2, "--html")
    refused(run(capsys, *ask, "--junit", tmp_path), 2, "--junit", "is no file")
    os.mkfifo(tmp_path / "pipe")
    refused(run(capsys, *ask, "--markdown", tmp_path / "pipe"), 2, "--markdown", "is no file")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "summary.md"))
    refused(run(capsys, *ask), 4, "summary.md")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    refused(run(capsys, *ask, "--cache", tmp_path, "--no-cache"), 2, "--cache")
    refused(run(capsys, *ask, "--baseline", tmp_path / "none"), 2, "none", "--baseline", "a run that was kept")
    refused(run(capsys, "tiny-glmm", "--task", mine), 2, "tiny-glmm")
    refused(run(capsys, *ask, "--endpoint-model", "m"), 2, "--endpoint")
    refused(run(capsys, *ask, "--task", "fidelity", "--transformers", artifact), 2, "fidelity")
    (tmp_path / "suite.yaml").write_text("tasks: [fidelity, mine.yaml]\n")
    suite = (artifact, "--suite", tmp_path / "suite.yaml", "--no-attach")
    refused(run(capsys, *suite, "--transformers", artifact), 2, "--task fidelity", "does not give")
    refused(run(capsys, artifact, "--gate", "default", "--transformers", artifact), 2, "--task fidelity")
    mine.write_text(TASK + "name: fidelity\n")
    refused(run(capsys, *suite), 2, "another task is called fidelity")


def test_a_kept_answer_file_that_is_none_is_said_before_anything_runs(
    artifact: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("quantkit_serve.model.runner.open_runner", never)
    (tmp_path / "responses.sqlite").write_bytes(b"something else, " * 100)
    refused(run(capsys, artifact, "--task", mine, "--no-attach", "--cache", tmp_path), 3, "Delete it")


def test_an_artifact_that_cannot_be_written_is_said_first(
    artifact: Path, mine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)  # root writes everywhere else
    refused(run(capsys, artifact, "--task", mine), 4, "Read-only", "attach")


def test_runs_that_were_not_asked_the_same_are_refused(
    artifact: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ("--task", mine, "--no-attach", "-o")
    assert run(capsys, artifact, *ask, tmp_path / "one")[0] == 0
    (tmp_path / "mine.jsonl").write_text(LINES.replace("sun", "moon"))
    assert run(capsys, artifact, *ask, tmp_path / "two")[0] == 0
    one, two = tmp_path / "one" / "baseline", tmp_path / "two" / "baseline"
    refused(run(capsys, "compare", one, tmp_path / "two" / "dual-fp8-kv"), 2, "mine")
    refused(run(capsys, artifact, *ask, tmp_path / "three", "--baseline", one), 2, "mine", "another version")
    refused(
        run(capsys, artifact, "--task", "tool_calls", "--no-attach", "--baseline", one), 2, "none of the tasks"
    )
    assert run(capsys, artifact, *ask, tmp_path / "four", "--baseline", two)[0] == 0


def test_weights_that_are_no_numbers_are_one_error_though_answers_were_kept(
    artifact: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Path(shutil.copytree(artifact, tmp_path / "broken"))
    ask = (broken, "--task", mine, "--no-attach", "-o", tmp_path / "out")
    assert run(capsys, *ask)[0] == 0
    shutil.rmtree(tmp_path / "out")
    path = next((broken / "decode").glob("model-layer-00001*"))
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for name, entry in header.items():
        if name.endswith("weight_scale") and "experts" in name:
            start, stop = (8 + size + offset for offset in entry["data_offsets"])
            data[start:stop] = b"\xff" * (stop - start)
    path.write_bytes(data)
    refused(run(capsys, *ask), 3, "dual, fp8 KV, task mine, item", "not numbers")
    assert list((tmp_path / "out").iterdir()) == []


def test_fp8_weights_against_the_checkpoint_they_were_made_of(
    artifact: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(shutil.copytree(artifact / "prefill", tmp_path / "source"))
    code, text, err = run(
        capsys, artifact, "--task", mine, "--no-attach", "--json", "--baseline", source,
        "--weights", "fp8", "--weights", "dual", "--kv-dtype", "bf16",
    )  # fmt: skip
    document = json.loads(text)
    assert code == 0 and document["baseline"]["label"] == "source, bf16 KV", err
    assert [one["label"] for one in document["candidates"]] == ["fp8, bf16 KV", "dual, bf16 KV"]

    code, text, err = run(capsys, source, "--task", mine, "--json")
    document = json.loads(text)  # it could be BF16, so it is not called FP8
    assert code == 0 and document["baseline"]["label"] == "as published, bf16 KV", err
    assert [one["label"] for one in document["candidates"]] == ["as published, fp8 KV"]


def test_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, "tasks", "--json")
    found = json.loads(text)
    assert code == 0
    assert {"cloze", "heldout", "copy"} <= {task["name"] for task in found["tasks"]}
    assert {"quick", "standard", "tools"} == {suite["name"] for suite in found["suites"]}
    assert {"default", "strict", "accuracy"} <= {each["name"] for each in found["gates"]}
    assert next(task for task in found["tasks"] if task["name"] == "cloze")["items"] >= 2500


def test_a_schema_that_can_not_be_enforced_names_its_item(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ask.yaml").write_text("kind: generate\ndata: ask.jsonl\nmax_tokens: 4\n")
    schemas = {"good": {"type": "integer"}, "bad": {"type": "string", "pattern": "(?=a)b"}}
    lines = [json.dumps({"id": name, "prompt": "A:", "json_schema": schema}) for name, schema in schemas.items()]
    (tmp_path / "ask.jsonl").write_text("\n".join(lines))
    code, _, err = run(capsys, artifact, "--task", tmp_path / "ask.yaml", "--no-attach")
    assert code == 2 and "error: task ask, item bad: json_schema: regex parse error" in err


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_tokenizer_that_is_damaged_is_one_error(
    name: str, artifact: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Path(shutil.copytree(artifact, tmp_path / "broken"))
    (broken / "decode" / name).write_text("{")
    refused(run(capsys, broken, "--task", mine, "--no-attach", "--no-cache"), 3, "its tokenizer can't be loaded")
