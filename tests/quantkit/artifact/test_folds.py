"""Verification of folds: every way to damage one is found; and what an older or newer reader makes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import api
from quantkit.artifact import Artifact, verify_artifact
from quantkit.artifact.layout import MANIFEST, TENSORS
from quantkit.errors import ArtifactError
from tests.builders import write_moe
from tests.quantkit.convert.test_calibrated import run, samples_of

Tensors = dict[str, np.ndarray]
FILE = "folds/model-layer-00001.safetensors"
NAME = "model.layers.1.mlp.experts.2.up_proj.awq_scale"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folds")
    source = write_moe(folder / "source", "qwen3_moe")
    run(source, folder / "out", given=samples_of(2, 40), method="awq")
    return folder / "out"


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def read(path: Path) -> Tensors:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    entries = {k: v for k, v in json.loads(data[8 : 8 + size]).items() if k != "__metadata__"}
    body = data[8 + size :]
    return {k: np.frombuffer(body[slice(*v["data_offsets"])], "<f4") for k, v in entries.items()}


def write(path: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {}
    body = b""
    for name, array in tensors.items():
        dtype = {"<f4": "F32", "<f8": "F64"}[array.dtype.str]
        header[name] = {
            "dtype": dtype, "shape": list(array.shape), "data_offsets": [len(body), len(body) + array.nbytes],
        }  # fmt: skip
        body += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def problems(artifact: Path, *, quick: bool = False) -> set[str]:
    """Names of the checks that failed, with what the checks of folds said."""
    found = verify_artifact(artifact, quick=quick).problems
    return {f"folds: {c.detail} ({c.where})" if c.name == "folds" else c.name for c in found}


def with_entry(value: float) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        scale = tensors[NAME].copy()
        scale[5] = value
        return {**tensors, NAME: scale}

    return change


def test_sound(made: Path) -> None:
    report = verify_artifact(made)
    (check,) = (c for c in report.checks if c.name == "folds")
    assert report.ok and check.detail.startswith("8 scales")


DAMAGE: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "missing": (lambda t: {k: v for k, v in t.items() if k != NAME}, "is missing"),
    "extra": (lambda t: {**t, "other.awq_scale": t[NAME]}, "belongs to no weight"),
    "shorter": (lambda t: {**t, NAME: t[NAME][:-1]}, "does not fit its weights"),
    "two dimensions": (lambda t: {**t, NAME: t[NAME][None]}, "does not fit its weights"),
    "wider": (lambda t: {**t, NAME: t[NAME].astype("<f8")}, "is F64"),
    "NaN": (with_entry(np.nan), "entry 5 is nan"),
    "infinite": (with_entry(np.inf), "entry 5 is inf"),
    "zero": (with_entry(0.0), "entry 5 is 0"),
    "negative": (with_entry(-1.0), "entry 5 is -1"),
    "other": (with_entry(3.0), "holds other bytes than recorded"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found(kind: str, copy: Path) -> None:
    change, says = DAMAGE[kind]
    write(copy / FILE, change(read(copy / FILE)))
    found = problems(copy)
    assert "files" in found
    assert any(f.startswith("folds") and says in f for f in found), found


def resigned(artifact: Path, file: str) -> None:
    """The manifest after somebody changed a file and its digest."""
    import hashlib

    manifest = json.loads((artifact / MANIFEST).read_bytes())
    data = (artifact / file).read_bytes()
    manifest["files"][file] = {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (artifact / MANIFEST).write_text(json.dumps(manifest))


def test_a_wrong_scale_shows_in_the_errors_whatever_the_digests_say(copy: Path) -> None:
    """Every scale doubled, and every digest of it made to fit."""
    import hashlib

    for file in (copy / "folds").iterdir():
        write(file, {name: scale * 2 for name, scale in read(file).items()})
        resigned(copy, f"folds/{file.name}")
    records = [json.loads(line) for line in (copy / TENSORS).read_text().splitlines()]
    for record in records:
        if fold := record["decode"].get("fold"):
            file = copy / "folds" / f"model-layer-{record['layer']:05d}.safetensors"
            fold["sha256"] = hashlib.sha256(read(file)[fold["tensor"]].tobytes()).hexdigest()
    (copy / TENSORS).write_text(
        "".join(json.dumps(r, sort_keys=True, separators=(",", ":")) + "\n" for r in records)
    )
    resigned(copy, TENSORS)
    assert problems(copy) == {"attachments", "error"}


@pytest.mark.parametrize("part", ["up_proj", "down_proj"])
def test_a_scale_has_one_up_and_one_down(part: str, copy: Path) -> None:
    lines = (copy / TENSORS).read_text().splitlines()
    changed = []
    for line in lines:
        record = json.loads(line)
        if record["name"] == f"model.layers.1.mlp.experts.2.{part}.weight":
            del record["decode"]["fold"]
        changed.append(json.dumps(record))
    (copy / TENSORS).write_text("\n".join(changed) + "\n")
    resigned(copy, TENSORS)
    assert any("used by 1 weights" in f for f in problems(copy, quick=True))


@pytest.mark.parametrize(
    "value", [3, "x", {}, {"tensor": 1, "sha256": "", "axis": 0}, {"tensor": "", "sha256": "", "axis": 2}]
)
def test_a_record_whose_fold_is_none(value: Any, copy: Path) -> None:
    lines = (copy / TENSORS).read_text().splitlines()
    record = json.loads(lines[0])
    record["decode"]["fold"] = value
    (copy / TENSORS).write_text("\n".join([json.dumps(record), *lines[1:]]) + "\n")
    assert "records" in problems(copy, quick=True)


def test_folds_of_a_version_that_has_none(copy: Path) -> None:
    manifest = json.loads((copy / MANIFEST).read_bytes())
    (copy / MANIFEST).write_text(json.dumps({**manifest, "format_version": 1}))
    assert {
        "manifest",
        f"folds: format version 1 has no folds, but the records name some ({MANIFEST})",
    } <= problems(copy)


def test_a_newer_version_is_not_read(copy: Path) -> None:
    manifest = json.loads((copy / MANIFEST).read_bytes())
    (copy / MANIFEST).write_text(json.dumps({**manifest, "format_version": 3}))
    with pytest.raises(ArtifactError, match="format version 3"):
        Artifact.open(copy)


def test_a_damaged_header_is_a_finding(copy: Path) -> None:
    (copy / FILE).write_bytes(b"\xff" * 64)
    assert any(f.startswith("folds") for f in problems(copy))
    shutil.rmtree(copy / "folds")
    assert any(f.startswith("folds") for f in problems(copy))


@pytest.mark.parametrize("damage", ["records emptied", "no folder", "an empty folder"])
def test_what_needs_folds_is_not_compared_without_them(copy: Path, damage: str) -> None:
    """Weights as they lie would be compared with the source's, and called changed by what was only moved."""
    if damage == "records emptied":
        (copy / TENSORS).write_bytes(b"")
    else:
        shutil.rmtree(copy / "folds")
        if damage == "an empty folder":
            (copy / "folds").mkdir()
    for side in (copy, copy / "decode"):
        with pytest.raises(
            ArtifactError, match="manifest says" if "records" in damage else "lacks its folds"
        ) as said:
            api.diff(copy / "prefill", side)
        assert said.value.exit_code == 3 and "verify" in (said.value.hint or "")
    with Artifact.open(copy) as artifact, pytest.raises(ArtifactError):
        artifact.decode[NAME.removesuffix(".awq_scale")].unfolded()


def test_missing_folds_are_one_problem_of_each_check(copy: Path) -> None:
    shutil.rmtree(copy / "folds")
    found = {c.name: c.detail for c in verify_artifact(copy).problems if c.name != "files"}
    assert found.keys() == {"folds", "error"}
    assert found["error"] == "not checked: folds cannot be opened, see folds"
    assert sum(c.name == "error" for c in verify_artifact(copy).problems) == 1
