"""``quantkit serve`` and ``quantkit generate`` as programs, on an artifact of the bundled model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import quantkit
from quantkit.artifact.layout import JOURNAL
from quantkit.errors import ArtifactError, UsageError
from quantkit_serve.start.servable import servable

PROMPT = "Once upon a time"
Started = tuple[subprocess.Popen[str], str, list[str]]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("serve") / "tiny-w4"
    quantkit.convert(quantkit.plan("tiny-glm", method="rtn"), target)
    return target


def quantkit_(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quantkit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **more})


@contextmanager
def served(*arguments: str, **more: str) -> Iterator[Started]:
    """A server on a free port: the process, its address, the lines of its stderr so far."""
    process = subprocess.Popen(
        [sys.executable, "-m", "quantkit", "serve", *arguments, "--port", "0", "--kv-memory", "16MiB"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, **more},
    )  # fmt: skip
    lines: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")))  # type: ignore
    reader.start()
    try:
        end = time.monotonic() + 100
        while not (found := re.search(r"answering at (\S+);", "".join(lines))):
            assert process.poll() is None and time.monotonic() < end, lines
            time.sleep(0.05)
        yield process, found[1], lines
    finally:
        process.kill()
        process.wait()
        reader.join()


def test_a_client_is_answered_and_a_signal_lets_answers_finish(artifact: Path) -> None:
    with served(str(artifact), QUANTKIT_API_KEYS="one,two") as (process, url, lines):
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="three").models.list()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="two")
        assert [model.id for model in client.models.list()] == ["tiny-w4"]
        more: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
        stream = client.completions.create(
            model="tiny-w4", prompt=PROMPT, max_tokens=200, temperature=0, stream=True, **more
        )
        text = next(iter(stream)).choices[0].text
        process.send_signal(signal.SIGTERM)
        last = None
        for chunk in stream:
            text += chunk.choices[0].text
            last = chunk.choices[0].finish_reason or last
        assert last == "length"
        assert process.wait(30) == 0
    assert any("KV cache: " in line for line in lines)
    alone = quantkit_("generate", str(artifact), PROMPT, "--max-tokens", "200", "--json")
    assert alone.returncode == 0, alone.stderr
    answer = json.loads(alone.stdout)
    assert text.startswith(answer["text"]) and answer["finish_reason"] in ("stop", "length")


def test_a_fault_is_met_and_ends_one_request(artifact: Path) -> None:
    with served(str(artifact), "--inject-fault", "free-early") as (_, url, lines):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        with pytest.raises(openai.APIError, match="KV page check failed"):
            client.completions.create(model="tiny-w4", prompt=PROMPT, max_tokens=8)
        assert client.completions.create(model="tiny-w4", prompt=PROMPT, max_tokens=8).choices[0].text
        metrics = httpx.get(f"{url}/metrics").text
        assert re.search(r"quantkit:kv_tag_mismatches\S* 1\.0", metrics)
    assert any("expected page" in line for line in lines)


def test_two_workers_answer_and_drain(artifact: Path) -> None:
    more: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
    with served(str(artifact), "--split", "--split-threads", "prefill=1,decode=1") as (process, url, lines):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        stream = client.completions.create(model="tiny-w4", prompt=PROMPT, max_tokens=100, stream=True, **more)
        next(iter(stream))
        assert re.search(r"quantkit:handoff_seconds_count\S* 1\.0", httpx.get(f"{url}/metrics").text)
        process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert process.wait(30) == 0
    assert any("two workers, prefill with 1 and decode with 1 threads" in line for line in lines)


def test_generate_streams_text_to_stdout(artifact: Path) -> None:
    done = quantkit_("generate", str(artifact), PROMPT, "--max-tokens", "12", "--weights", "fp8", "-q")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.endswith("\n") and len(done.stdout) > 12
    sampled = [
        quantkit_("generate", str(artifact), PROMPT, "--temperature", "1", "--seed", "7", "--json").stdout
        for _ in range(2)
    ]
    assert len({json.loads(found)["text"] for found in sampled}) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("generate", "no-such", PROMPT), 2, "is not a directory"),
        (("generate", "ARTIFACT", ""), 2, "no tokens"),
        (("generate", "ARTIFACT", PROMPT, "--max-tokens", "9999999"), 2, "max_tokens"),
        (("generate", "ARTIFACT/decode", PROMPT), 2, "plain checkpoint"),
        (("generate", "ARTIFACT", PROMPT, "--kv-memory", "1KiB"), 2, "page"),
        (("generate", "ARTIFACT", PROMPT, "--kv-dtype", "f32"), 2, "float32"),
        (("serve", "ARTIFACT", "--host", "203.0.113.1"), 4, "can't listen"),
        (("serve", "ARTIFACT", "--api-key-file", "/dev/null"), 2, "no API key"),
        (("serve", "ARTIFACT", "--split-threads", "prefill=1,decode=1"), 2, "with --split"),
        (("serve", "ARTIFACT", "--split", "--split-threads", "2"), 2, "prefill=N,decode=N"),
        (("serve", "ARTIFACT/decode", "--split", "--port", "0"), 2, "plain checkpoint"),
        (("serve", "ARTIFACT", "--port", "0", "--kv-memory", "4096TiB"), 4, "--kv-memory: KV pages of 45"),
        (("generate", "ARTIFACT", PROMPT, "--max-model-len", "9999999"), 2, "--max-model-len: is 9999999"),
        (("generate", "ARTIFACT", PROMPT, "--num-speculative-tokens", "2"), 2, "with --speculative mtp"),
    ],
)
def test_what_can_not_be_is_one_error(artifact: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    done = quantkit_(*(a.replace("ARTIFACT", str(artifact)) for a in arguments))
    assert done.returncode == code, done.stderr
    assert done.stderr.count("error:") == 1 and said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bundled_model_is_converted_once(tmp_path: Path) -> None:
    arguments = ("generate", "tiny-qwen3", PROMPT, "--max-tokens", "2", "--json")
    first = quantkit_(*arguments, XDG_CACHE_HOME=str(tmp_path))
    assert first.returncode == 0 and "converted first" in first.stderr, first.stderr
    again = quantkit_(*arguments, XDG_CACHE_HOME=str(tmp_path))
    assert "converted first" not in again.stderr
    assert json.loads(again.stdout)["token_ids"] == json.loads(first.stdout)["token_ids"]
    assert [path.name for path in (tmp_path / "quantkit/artifacts").iterdir()] == [
        f"tiny-qwen3-{quantkit.__version__}"
    ]


def test_a_directory_without_a_model_is_named(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"neither an artifact nor a checkpoint: .*manifest\.json"):
        servable(str(tmp_path / "empty"))
    (tmp_path / "w4.partial").mkdir()
    (tmp_path / "w4.partial" / JOURNAL).touch()
    with pytest.raises(ArtifactError, match=r"w4\.partial: is a conversion that has not ended"):
        servable(str(tmp_path / "w4.partial"))
    assert servable(str(artifact)).name == servable(str(artifact / "decode/../../tiny-w4")).name == "tiny-w4"


def test_a_bundled_models_artifact_by_its_usual_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(plan: Any, target: Path, **_: Any) -> None:
        target.mkdir()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("quantkit.convert", convert)
    monkeypatch.setattr("quantkit.plan", lambda source: source)
    monkeypatch.chdir(tmp_path)
    assert servable("tiny-glm-w4") == servable("tiny-glm")
    (tmp_path / "tiny-glm-w4").mkdir()
    with pytest.raises(ArtifactError, match="neither an artifact"):  # what is there is meant
        servable("tiny-glm-w4")
    with pytest.raises(UsageError, match="not a directory"):
        servable("tiny-glm-w4-w4")


def test_the_context_that_is_printed_fits_the_pool(artifact: Path) -> None:
    with served(str(artifact), "--page-size", "16") as (_, url, lines):
        said = re.search(r"KV cache: ([\d,]+) tokens .*context up to ([\d,]+) tokens", "".join(lines))
        assert said is not None
        stored, context = (int(number.replace(",", "")) for number in said.groups())
        assert context == min(2048, stored + 1) == httpx.get(f"{url}/version").json()["max_model_len"]


@pytest.mark.parametrize("option", ["--json", "-q"])
def test_a_script_is_told_the_address(artifact: Path, option: str) -> None:
    command = [sys.executable, "-m", "quantkit", "serve", str(artifact), "--port", "0", option]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        while option == "--json" and not said.endswith("}\n"):
            said += process.stdout.readline() or pytest.fail(said)
        url = json.loads(said)["url"] if option == "--json" else said.strip()
        try:
            assert httpx.get(f"{url}/health").status_code == 200
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] == "" and process.returncode == 0
