"""``quantkit fidelity`` on the bundled model: figures, attachment, and what it refuses."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit.artifact import Artifact, verify_artifact
from quantkit.artifact.attachments import read_attachments
from quantkit.cli.main import main
from quantkit.data import bundled_text
from quantkit_evals.artifact import measure_artifact
from quantkit_evals.dequantized import bf16_copy_bytes, write_bf16_copy
from quantkit_evals.models import load_model
from quantkit_evals.perplexity import perplexity
from quantkit_evals.text import token_blocks


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("fidelity") / "tiny-w4"
    quantkit.convert(quantkit.plan("tiny-qwen3", method="rtn", group_size=128), target).close()
    return target


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["fidelity", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_figures_and_attachment(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path.parent / "torch"))  # made where triton is installed
    code, out, err = run(capsys, artifact, "--tokens", "600", "--attach", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert "temporary space" in err and list(tmp_path.iterdir()) == []  # the copies are gone
    assert (found["blocks"], found["predicted_tokens"], found["dtype"]) == (2, 2 * 255, "bfloat16")
    decode, floor = found["decode"], found["noise_floor"]
    assert decode["kl_99"]["value"] > decode["kl_mean"]["value"] > decode["kl_median"]["value"] > 1e-4
    assert floor["kl_99"]["value"] < 0.1 * decode["kl_median"]["value"]
    assert 0.8 < decode["top1_agreement"]["value"] < 1 and floor["top1_agreement"]["value"] > 0.99
    assert all(figure["stderr"] >= 0 for side in (decode, floor) for figure in side.values())
    # the oracle for the perplexity: the prefill view's own copy, measured alone
    model = load_model(write_bf16_copy(artifact / "prefill", tmp_path / "copy"))
    alone = perplexity(model, token_blocks(artifact / "decode", num_blocks=2))
    assert found["perplexity"]["prefill"]["value"] == pytest.approx(alone.value, rel=1e-9)
    kept = json.loads((artifact / "attachments" / "evals" / "fidelity.json").read_text())
    assert {"artifact": str(artifact), **kept} == found
    assert kept["pair_id"] == Artifact.open(artifact).manifest.pair_id
    assert verify_artifact(artifact).ok


def test_for_people_on_a_text_of_ones_own_and_again(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "mine.txt"
    text.write_text(bundled_text("heldout").read_text(encoding="utf-8")[-3000:], encoding="utf-8")
    for _ in range(2):  # attaching again replaces
        code, out, err = run(capsys, artifact, "--tokens", "256", "--text", text, "--dtype", "float32", "--attach")
        assert code == 0, err
    assert "mine.txt" in out and "float32 arithmetic" in out and "noise floor" in out
    assert "KL divergence, 99 %" in out and "over 1 blocks" in out
    names = [entry["path"] for entry in read_attachments(artifact)]
    assert names.count("attachments/evals/fidelity.json") >= 2


def test_bytes_of_the_copies_are_what_is_stated(artifact: Path, tmp_path: Path) -> None:
    with Artifact.open(artifact) as opened:
        stated = bf16_copy_bytes(opened.decode.tensors)
        copy = write_bf16_copy(opened.decode.tensors, tmp_path / "copy")
    files = list(copy.glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(f.read_bytes()[:8], "little") for f in files)
    assert stated == sum(f.stat().st_size for f in files) - headers


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--text", "missing.txt"], 2, "no such text"),
        (["--tokens", "100"], 2, "--tokens"),
        (["--tokens", "100000000"], 2, "wanted"),
        (["--dtype", "int8"], 2, "--dtype"),
    ],
)
def test_options_that_cannot_work(
    artifact: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    seen, out, err = run(capsys, artifact, *arguments)
    assert (seen, out) == (code, "") and says in err


def test_figures_that_could_not_be_kept_are_not_measured(
    artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("quantkit_evals.artifact.tempfile.TemporaryFile", read_only)
    monkeypatch.setattr("quantkit_evals.artifact.measure_artifact", never)
    code, out, err = run(capsys, artifact, "--attach")
    assert (code, out) == (4, "") and "Read-only file system" in err and "Omit --attach" in err


def test_text_that_is_not_utf8(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.txt").write_bytes(b"fine \xff")
    code, _, err = run(capsys, artifact, "--text", tmp_path / "x.txt")
    assert code == 2 and "not UTF-8 text" in err


def test_not_an_artifact_and_a_reference(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, tmp_path)
    assert code == 3 and "not an artifact" in err
    target = tmp_path / "reference"
    quantkit.convert(quantkit.plan("tiny-qwen3", method="rtn", place="reference"), target).close()
    code, _, err = run(capsys, target)
    assert code == 3 and "this view is a reference" in err and "--prefill copy" in err


def test_without_the_extra(
    artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = run(capsys, artifact)
    assert code == 4 and "pip install 'quantkit[eval]'" in err


def test_too_little_temporary_space(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Any = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with Artifact.open(artifact) as opened, pytest.raises(quantkit.errors.EnvironmentProblem, match="Set TMPDIR"):
        measure_artifact(opened, num_tokens=256)


def test_a_large_vocabulary_runs_few_blocks_at_once() -> None:
    from quantkit_evals.artifact import _batch_blocks

    assert [_batch_blocks({"vocab_size": n}) for n in (4096, 151_552, 10**7)] == [8, 3, 2]
    assert _batch_blocks({"text_config": {"vocab_size": 151_552}}) == 3
    assert np.prod((3, 256, 151_552)) * 2 < 1 << 28  # bytes of BF16 logits
