"""Conversion as a whole: every kind of source, the same bytes for any number of workers, placement, memory."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from quantkit.artifact import Artifact, verify_artifact
from quantkit.artifact.layout import INDEX
from quantkit.checkpoint import open_checkpoint
from quantkit.convert import Progress
from quantkit.errors import EnvironmentProblem, UsageError
from tests.builders import FAMILIES, e4m3_table, expand, moe, write_checkpoint, write_moe
from tests.quantkit.convert.cases import core_digests, run


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("source") / "model", "glm_moe_dsa")


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    run(source, out, jobs=1)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_verifies(family: str, tmp_path: Path) -> None:
    source = write_moe(tmp_path / "model", family)
    native = family == "kimi_k25"
    artifact = run(source, tmp_path / "out", **({"make_fp8": True} if native else {}))
    report = verify_artifact(tmp_path / "out", against=source)
    assert report.ok, report.problems
    origins = {name: view.origin for name, view in artifact.manifest.views.items()}
    publisher = "decode" if native else "prefill"
    assert [name for name, origin in origins.items() if origin == "publisher"] == [publisher]


@pytest.mark.parametrize(
    ("family", "storage", "options"),
    [
        ("glm_moe_dsa", None, {"rest": "bf16"}),
        ("glm_moe_dsa", None, {"linears": "all", "mtp": "quantize", "group_size": 64}),
        ("glm4_moe", None, {"rest": "bf16", "linears": "all-mlp"}),
        ("qwen3_moe", None, {"rest": "bf16", "group_size": 128}),
        ("glm_moe_dsa", "bf16", {"make_fp8": True}),
        ("qwen3_moe", "bf16", {"make_fp8": True, "rest": "bf16"}),
        ("qwen3_moe", None, {"max_shard_size": "100kB"}),
    ],
)
def test_every_kind_of_output_verifies(
    family: str, storage: str | None, options: dict[str, Any], tmp_path: Path
) -> None:
    source = write_moe(tmp_path / "model", family, storage=storage)
    run(source, tmp_path / "out", **options)
    report = verify_artifact(tmp_path / "out", against=source)
    assert report.ok, report.problems


@pytest.mark.parametrize("jobs", [2, 4, None])
def test_same_bytes_for_any_number_of_workers(source: Path, made: Path, jobs: int | None, tmp_path: Path) -> None:
    run(source, tmp_path / "out", jobs=jobs)
    assert core_digests(tmp_path / "out") == core_digests(made)


def test_same_bytes_for_any_tile(
    source: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.convert import run as module
    from quantkit.plan.memory import Budget

    for tile in (900, 40_000):
        monkeypatch.setattr(module, "choose_budget", lambda *args, tile=tile: Budget(3, tile, 0))
        run(source, tmp_path / str(tile))
        assert core_digests(tmp_path / str(tile)) == core_digests(made)


def test_source_may_lie_anywhere(source: Path, made: Path, tmp_path: Path) -> None:
    """No path of the machine gets into the core."""
    other = tmp_path / "elsewhere" / "deep"
    other.mkdir(parents=True)
    for path in source.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    run(other, tmp_path / "out")
    assert core_digests(tmp_path / "out") == core_digests(made)


def test_prefill_is_the_publishers_bytes(source: Path, made: Path) -> None:
    for path in source.iterdir():
        assert (made / "prefill" / path.name).read_bytes() == path.read_bytes(), path.name


def test_decode_view_by_an_independent_reader(source: Path, made: Path) -> None:
    """Tensors passed through are equal, experts are near, and safetensors' own reader agrees on all of it."""
    index = json.loads((made / "decode" / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    stored = {name: tensor for file in files for name, tensor in raw(made / "decode" / file).items()}
    assert stored.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in stored.values())
    tensors, _ = moe("glm_moe_dsa")
    for name, tensor in tensors.items():
        expert = ".mlp.experts." in name and not name.startswith("model.layers.2.")
        if not expert:
            target = name.replace("weight_scale_inv", "weight_scale")
            assert stored[target] == (tensor.dtype, tuple(tensor.shape), bytes(tensor.data)), name
    module = "model.layers.1.mlp.experts.2.down_proj"
    packed = np.frombuffer(stored[f"{module}.weight_packed"][2], "<u4").reshape(256, 16)
    nibbles = (packed[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    scale_bits = np.frombuffer(stored[f"{module}.weight_scale"][2], "<u2").astype(np.uint32) << 16
    scale = scale_bits.view(np.float32).reshape(256, 4)
    ours = (nibbles.reshape(256, 128).astype(np.float32) - 8) * np.repeat(scale, 32, axis=1)
    codes, block_scales = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale_inv"]
    exact = e4m3_table()[np.frombuffer(codes.data, np.uint8)].reshape(256, 128).astype(np.float32) * expand(
        np.frombuffer(block_scales.data, "<f4").reshape(2, 1), (128, 128), (256, 128)
    )
    assert np.linalg.norm(ours - exact) / np.linalg.norm(exact) < 0.12
    with Artifact.open(made) as artifact:
        assert np.array_equal(artifact.decode[module].dequantize(), ours)
        assert np.array_equal(artifact.prefill[module].dequantize(), exact)


def raw(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """A safetensors file by the format's description alone."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    base = 8 + size
    return {
        name: (
            entry["dtype"], tuple(entry["shape"]),
            data[base + entry["data_offsets"][0] : base + entry["data_offsets"][1]],
        )
        for name, entry in header.items()
    }  # fmt: skip


def test_files_open_with_safetensors(made: Path) -> None:
    for path in sorted((made / "decode").glob("*.safetensors")):
        with safe_open(path, framework="np") as handle:
            found = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
        assert found == {name: shape for name, (_, shape, _) in raw(path).items()}


def test_modes_follow_the_umask(source: Path, tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        run(source, tmp_path / "out")
    finally:
        os.umask(old)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert modes == {0o640}


@pytest.mark.parametrize("mode", ["auto", "copy", "link", "reference"])
def test_placement(source: Path, made: Path, mode: str, tmp_path: Path) -> None:
    artifact = run(source, tmp_path / "out", place=mode)
    assert artifact.manifest.pair_id == Artifact.open(made).manifest.pair_id
    shard = "model-00001-of-00003.safetensors"
    placed = tmp_path / "out" / "prefill" / shard
    if mode == "reference":
        assert [path.name for path in (tmp_path / "out" / "prefill").iterdir()] == ["quantkit_view.json"]
        assert artifact.manifest.views["prefill"].stored == "reference"
        assert artifact.manifest.source.files == Artifact.open(made).manifest.source.files
    else:
        assert core_digests(tmp_path / "out") == core_digests(made)
        assert placed.samefile(source / shard) == (mode == "link")
    assert bool(artifact.warnings) == (mode == "link")
    report = verify_artifact(tmp_path / "out", against=source)
    assert report.ok, report.problems


def test_edit_of_a_linked_source_is_found(tmp_path: Path) -> None:
    source = write_moe(tmp_path / "model", "qwen3_moe")
    run(source, tmp_path / "out", place="link")
    shard = sorted(source.glob("*.safetensors"))[0]
    with open(shard, "r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        handle.write(b"\x01")
    problems = verify_artifact(tmp_path / "out").problems
    assert any(problem.name == "files" and problem.where == f"prefill/{shard.name}" for problem in problems)


def test_symbolic_links_are_resolved(source: Path, made: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in source.iterdir():
        (linked / path.name).symlink_to(path)
    for mode in ("copy", "link"):
        run(linked, tmp_path / mode, place=mode)
        assert core_digests(tmp_path / mode) == core_digests(made)
        assert not any(path.is_symlink() for path in (tmp_path / mode).rglob("*"))


def test_finished_directory_is_a_no_op(source: Path, tmp_path: Path) -> None:
    assert not run(source, tmp_path / "out").was_complete
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = run(source, tmp_path / "out")
    assert again.was_complete
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == times
    with pytest.raises(UsageError, match="another plan"):
        run(source, tmp_path / "out", method="mse")


def test_single_file_source_into_its_own_folder(tmp_path: Path) -> None:
    tensors, config = moe("qwen3_moe")
    folder = write_checkpoint(tmp_path / "model", tensors, config, shards=1, file_name="model.safetensors")
    (folder / INDEX).unlink(missing_ok=True)
    run(folder / "model.safetensors", folder / "out")
    assert verify_artifact(folder / "out").ok
    assert not (folder / "out" / "prefill" / INDEX).exists()


def test_stale_published_index_is_made_anew(tmp_path: Path) -> None:
    """An index without total_size, or no index for several files, is replaced; an honest one is kept."""
    source = write_moe(tmp_path / "model", "qwen3_moe")
    content = json.loads((source / INDEX).read_text())
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": content["weight_map"]}))
    run(source, tmp_path / "out")
    made = json.loads((tmp_path / "out" / "prefill" / INDEX).read_text())
    with open_checkpoint(source) as checkpoint:
        assert made["metadata"]["total_size"] == checkpoint.nbytes
    assert made["weight_map"] == content["weight_map"]


def test_progress_ends_at_the_total(source: Path, tmp_path: Path) -> None:
    events: list[Progress] = []
    run(source, tmp_path / "out", on_progress=events.append)
    assert "resumed" not in {event.unit for event in events}  # nothing was
    done = [event.done_bytes for event in events]
    assert done == sorted(done) and done[-1] == events[-1].total_bytes
    assert {event.stage for event in events} >= {"sources", "weights"}


def test_memory_limit_is_honoured_or_refused(source: Path, made: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="one worker needs") as caught:
        run(source, tmp_path / "out", max_memory=1 << 20)
    assert caught.value.exit_code == 4 and not (tmp_path / "out.partial").exists()
    run(source, tmp_path / "out", max_memory=2 << 30)
    assert core_digests(tmp_path / "out") == core_digests(made)


def test_no_view_mark_is_inherited(made: Path, tmp_path: Path) -> None:
    """The prefill view of an artifact is a source like any other; the new views carry the new pair."""
    artifact = run(made / "prefill", tmp_path / "out", group_size=64)
    assert artifact.manifest.pair_id != Artifact.open(made).manifest.pair_id
    assert verify_artifact(tmp_path / "out").ok


def test_pair_is_the_same_whether_the_family_is_named_or_found(tmp_path: Path) -> None:
    """The bundled model by name (its recipe names the family) and a copy of it by path (the family is found)."""
    from quantkit import convert
    from quantkit.data import bundled_model

    named = convert("tiny-qwen3", tmp_path / "named")
    copy = tmp_path / "copy"
    shutil.copytree(bundled_model("tiny-qwen3"), copy)
    found = convert(str(copy), tmp_path / "found")
    assert named.manifest.pair_id == found.manifest.pair_id
