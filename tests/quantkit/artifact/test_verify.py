"""Verification finds what was done to an artifact, names it, and never falls over it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quantkit.artifact import Artifact, verify_artifact
from quantkit.artifact.canonical import hash_file
from quantkit.artifact.layout import INDEX, JOURNAL, MANIFEST, TENSORS, VIEW_FILE
from quantkit.artifact.progress import Progress
from quantkit.errors import ArtifactError
from tests.builders import write_moe
from tests.quantkit.convert.cases import core_digests, run


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("source") / "model", "glm_moe_dsa")


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    run(source, out)
    return out


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def found(artifact: Path, *, quick: bool = False) -> set[tuple[str, str | None]]:
    return {(check.name, check.where) for check in verify_artifact(artifact, quick=quick).problems}


def test_sound(made: Path, source: Path) -> None:
    events: list[Progress] = []
    report = verify_artifact(made, against=source, on_progress=events.append)
    assert report.ok and not any(check.skipped for check in report.checks)
    assert {check.name for check in report.checks} >= {
        "manifest", "records", "files", "attachments", "marks", "headers of decode", "headers of prefill",
        "pairing", "scales of decode", "scales of prefill", "error", "engines of decode", "source",
    }  # fmt: skip
    assert events[-1].done_bytes == events[-1].total_bytes
    assert json.dumps(report.to_json())


def test_quick_reads_no_weights(copy: Path) -> None:
    """A flipped weight byte is beyond ``quick``; what it skips it says."""
    flip(copy / "decode" / "model-layer-00001.safetensors")
    report = verify_artifact(copy, quick=True)
    assert report.ok and {check.name for check in report.checks if check.skipped} == {"scales", "error"}
    assert not verify_artifact(copy).ok


def test_one_flipped_byte_in_any_core_file(made: Path, tmp_path: Path) -> None:
    for name in core_digests(made):
        if name == MANIFEST:
            continue
        copy = Path(shutil.copytree(made, tmp_path / name.replace("/", "-")))
        flip(copy / name, len((copy / name).read_bytes()) // 2)
        assert ("files", name) in found(copy), name
        shutil.rmtree(copy)


@pytest.mark.parametrize("view", ["decode", "prefill"])
def test_a_flipped_tensor_byte_names_the_tensor(copy: Path, view: str) -> None:
    path = sorted((copy / view).glob("*.safetensors"))[0]
    flip(path, -1)
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    header.pop("__metadata__", None)
    last = max(header, key=lambda name: header[name]["data_offsets"][1])
    assert (f"headers of {view}", f"{view}: {last}") in found(copy)


def edit(path: Path, change: Callable[[dict], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("pair_id", "0" * 64, "manifest"),
        ("engine", "other", "manifest"),
        ("calibration_sha256", "0" * 64, "manifest"),
        ("numerics_version", 99, "manifest"),
    ],
)
def test_changed_identity(copy: Path, key: str, value: object, name: str) -> None:
    edit(copy / MANIFEST, lambda m: m.__setitem__(key, value))
    assert name in {check for check, _ in found(copy, quick=True)}


def test_any_change_of_the_manifest_shows(copy: Path) -> None:
    edit(copy / MANIFEST, lambda m: m["source"].__setitem__("family", "another"))
    assert ("attachments", "attachments/provenance.intoto.json") in found(copy, quick=True)


def test_changed_recipe_changes_the_pair(copy: Path) -> None:
    edit(copy / MANIFEST, lambda m: m["recipe"]["decode"].__setitem__("group_size", 64))
    assert "manifest" in {name for name, _ in found(copy, quick=True)}


def test_foreign_view(source: Path, copy: Path, tmp_path: Path) -> None:
    """The decode view of another pair is refused by its mark."""
    run(source, tmp_path / "other", group_size=64)
    shutil.rmtree(copy / "decode")
    shutil.copytree(tmp_path / "other" / "decode", copy / "decode")
    problems = found(copy)
    assert ("marks", f"decode/{VIEW_FILE}") in problems
    assert any(name == "headers of decode" for name, _ in problems)


def test_all_problems_at_once(copy: Path) -> None:
    (copy / "decode" / "config.json").unlink()
    (copy / "prefill" / "LICENSE").write_text("longer than before\n")
    (copy / "decode" / "extra.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (copy / "attachments" / "report.json").write_text("{}")
    (copy / "attachments" / "stray.txt").write_text("?")
    assert found(copy, quick=True) >= {
        ("files", "decode/config.json"), ("files", "prefill/LICENSE"), ("files", "decode/extra.safetensors"),
        ("attachments", "attachments/report.json"), ("attachments", "attachments/stray.txt"),
    }  # fmt: skip


def rehash(artifact: Path, name: str) -> None:
    """What somebody does who wants a change to go unnoticed: enter the new digest into the manifest."""
    sha256, nbytes = hash_file(artifact / name)
    edit(artifact / MANIFEST, lambda m: m["files"].__setitem__(name, {"nbytes": nbytes, "sha256": sha256}))


def records(artifact: Path) -> list[dict]:
    return [json.loads(line) for line in (artifact / TENSORS).read_text().splitlines()]


def write_records(artifact: Path, lines: list[dict]) -> None:
    (artifact / TENSORS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    rehash(artifact, TENSORS)


@pytest.mark.parametrize("what", ["dropped", "doubled", "shape", "sha256", "action", "error", "outputs"])
def test_records_that_lie(copy: Path, what: str) -> None:
    lines = records(copy)
    quantized = next(i for i, line in enumerate(lines) if "relative_error" in line["decode"])
    line = lines[quantized]
    if what == "dropped":
        del lines[quantized]
    elif what == "doubled":
        lines.append(line)
    elif what == "shape":
        line["shape"] = [line["shape"][0] * 2, line["shape"][1] // 2]
    elif what == "sha256":
        line["sha256"] = "0" * 64
    elif what == "action":
        line["decode"] = {"action": "exclude"}
    elif what == "error":
        for other in lines:
            if "relative_error" in other["decode"]:
                other["decode"]["relative_error"] *= 0.5
    else:
        line["decode"]["outputs"] = dict.fromkeys(line["decode"]["outputs"], "0" * 64)
    write_records(copy, lines)
    problems = {name for name, _ in found(copy)}
    expected = {"error": "error", "outputs": "headers of decode"}.get(what, "records")
    assert expected in problems


def test_line_that_is_no_record(copy: Path) -> None:
    (copy / TENSORS).write_bytes((copy / TENSORS).read_bytes() + b"[]\n")
    assert "records" in {name for name, _ in found(copy)}


def test_nan_scale_with_matching_digests(copy: Path) -> None:
    """A NaN scale is found by looking at it, whatever the digests say."""
    name = "decode/model-layer-00001.safetensors"
    path = copy / name
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    tensor = next(n for n, e in header.items() if n.endswith("up_proj.weight_scale") and e["dtype"] == "BF16")
    start = 8 + size + header[tensor]["data_offsets"][0]
    data[start : start + 2] = np.uint16(0x7FC0).tobytes()
    path.write_bytes(data)
    rehash(copy, name)
    problems = verify_artifact(copy).problems
    assert any(p.name == "scales of decode" and tensor in str(p.where) for p in problems)


def test_derived_tensor_with_matching_digests(tmp_path: Path) -> None:
    """BF16 weights that are not the FP8 view's numbers are found, though every digest agrees."""
    out = tmp_path / "out"
    run(write_moe(tmp_path / "model", "qwen3_moe", layers=1), out, rest="bf16")
    assert {"transforms"} <= {check.name for check in verify_artifact(out).checks}
    lines = records(out)
    module = "model.layers.0.self_attn.q_proj.weight"
    path = next(p for p in sorted((out / "decode").glob("*.safetensors")) if module.encode() in p.read_bytes())
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    start, stop = (8 + size + edge for edge in json.loads(data[8 : 8 + size])[module]["data_offsets"])
    data[start] ^= 1
    path.write_bytes(data)
    rehash(out, f"decode/{path.name}")
    line = next(line for line in lines if line["name"] == module)
    line["decode"]["outputs"] = {module: hashlib.sha256(data[start:stop]).hexdigest()}
    write_records(out, lines)
    assert ("transforms", module.removesuffix(".weight")) in found(out)


def test_index_that_names_another_file(copy: Path) -> None:
    def swap(index: dict) -> None:
        files = sorted(set(index["weight_map"].values()))
        index["weight_map"] = {n: files[1] if f == files[0] else f for n, f in index["weight_map"].items()}

    edit(copy / "decode" / INDEX, swap)
    rehash(copy, f"decode/{INDEX}")
    assert "headers of decode" in {name for name, _ in found(copy, quick=True)}


def test_truncated_and_missing_shards(copy: Path) -> None:
    one, two = sorted((copy / "decode").glob("*.safetensors"))[:2]
    one.write_bytes(one.read_bytes()[:-100])
    two.unlink()
    assert found(copy) >= {("files", f"decode/{one.name}"), ("files", f"decode/{two.name}")}


def test_the_cause_of_a_view_that_does_not_open_stands_once(made: Path, tmp_path: Path) -> None:
    """And every check that it kept from being made says so in one line, and counts as failed."""

    def truncated(view: Path) -> None:
        path = view / "model-layer-00001.safetensors"
        path.write_bytes(path.read_bytes()[:-10])

    damages: dict[str, Callable[[Path], object]] = {
        "truncated": truncated,
        "deleted": lambda view: (view / "model-layer-00001.safetensors").unlink(),
        "stray": lambda view: (view / "extra.safetensors").write_bytes(b"?"),
        "config": lambda view: (view / "config.json").write_text("{"),
    }
    for damage, harm in damages.items():
        copy = Path(shutil.copytree(made, tmp_path / damage))
        harm(copy / "decode")
        problems = verify_artifact(copy).problems
        names = [p.name for p in problems]
        assert sorted(names) == ["engines of decode", "error", "files", "headers of decode", "scales of decode"], (
            damage
        )
        unmade = [p.detail for p in problems if p.name not in ("files", "headers of decode")]
        assert set(unmade) == {"not checked: the decode view cannot be opened, see headers of decode"}


def test_one_damage_that_many_weights_meet_is_one_problem(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ArtifactError("cannot be read", where="decode/model-layer-00001.safetensors")

    monkeypatch.setattr("quantkit.artifact.verify.numbers._check_error", fail)
    (problem,) = verify_artifact(copy).problems
    assert problem.name == "error" and problem.where == "decode/model-layer-00001.safetensors"
    assert problem.detail == "cannot be read (12 of 12 not checked)"


def test_wrong_source(made: Path, source: Path, tmp_path: Path) -> None:
    other = write_moe(tmp_path / "retrained", "glm_moe_dsa", seed=1)
    problems = verify_artifact(made, against=other).problems
    assert {p.name for p in problems} == {"source"} and len(problems) > 40
    assert verify_artifact(made, against=other, quick=True).ok  # same names and shapes
    fewer = write_moe(tmp_path / "fewer", "glm_moe_dsa", experts=3)
    assert any("not in the source" in p.detail for p in verify_artifact(made, against=fewer, quick=True).problems)


@pytest.mark.parametrize(
    "content", [None, b"{", b"[]", b"{}", b'{"format_version": 1}', b'{"format_version": 99}']
)
def test_not_an_artifact_at_all(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(ArtifactError) as caught:
        verify_artifact(tmp_path)
    assert caught.value.exit_code == 3
    with pytest.raises(ArtifactError, match="no such directory"):
        Artifact.open(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match="a file"):
        Artifact.open(tmp_path / "file")
    (tmp_path / "w4.partial").mkdir()
    (tmp_path / "w4.partial" / JOURNAL).touch()
    with pytest.raises(ArtifactError, match="unfinished"):
        Artifact.open(tmp_path / "w4.partial")


def test_view_access(made: Path) -> None:
    with Artifact.open(made) as artifact:
        module = "model.layers.1.mlp.experts.0.up_proj"
        assert module in set(artifact.decode.modules())
        assert artifact.decode[module].shape == (128, 256)
        assert artifact.decode[module].dequantize().dtype == np.float32
        with pytest.raises(ArtifactError, match="Did you mean"):
            artifact.decode[module + "s"]
        assert artifact.decode.mark.pair_id == artifact.prefill.mark.pair_id == artifact.manifest.pair_id
        assert sum(1 for _ in artifact.records()) == artifact.manifest.source.num_tensors
