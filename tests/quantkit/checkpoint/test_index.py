"""Which files are read, and the index held against the headers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quantkit.checkpoint import open_checkpoint
from quantkit.errors import SourceError
from tests.rawfiles import f32, write_checkpoint, write_file, write_index

X = f32(np.zeros(3))
ABC = {"a": X, "b": X, "c": X}


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(SourceError) as caught:
        open_checkpoint(folder)
    assert caught.value.exit_code == 3
    for part in parts:
        assert part in str(caught.value), (part, str(caught.value))
    assert caught.value.hint


@pytest.mark.parametrize("index", [True, False])
def test_with_and_without_index(tmp_path: Path, index: bool) -> None:
    write_checkpoint(tmp_path, ABC, {}, shards=3, index=index)
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["a", "b", "c"] and checkpoint.warnings == ()


def test_several_files_of_any_name_without_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, ABC, {}, shards={"x.safetensors": ["b"], "a.safetensors": ["c", "a"]}, index=False)
    assert list(open_checkpoint(tmp_path).tensors) == ["c", "a", "b"]


def test_file_outside_the_index_is_read_with_a_warning(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": X, "b": X}, {}, shards=2)
    write_file(tmp_path / "mtp.safetensors", {"mtp": X})
    checkpoint = open_checkpoint(tmp_path)
    assert "mtp" in checkpoint.tensors
    assert len(checkpoint.warnings) == 1 and "mtp.safetensors" in checkpoint.warnings[0]


def test_consolidated_copy_of_mistral_is_left_out(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": X}, {})
    write_file(tmp_path / "consolidated.safetensors", {"layers.0": X})
    (tmp_path / "consolidated.safetensors.index.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["a"] and "consolidated.safetensors" in checkpoint.warnings[0]


def test_index_of_another_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, ABC, {}, shards=2)
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "weights.safetensors.index.json")
    assert len(open_checkpoint(tmp_path).tensors) == 3
    (tmp_path / "more.safetensors.index.json").write_text("{}")
    refused(tmp_path, "several index files", "weights.safetensors.index.json")


def test_index_names_missing_shards(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {f"t{i:02d}": X for i in range(10)}, {}, shards=5)
    (tmp_path / "model-00002-of-00005.safetensors").unlink()
    refused(
        tmp_path, "model.safetensors.index.json", "model-00002-of-00005.safetensors", "2 tensors", "'t02', 't03'"
    )
    (tmp_path / "model-00004-of-00005.safetensors").unlink()
    refused(tmp_path, "2 files", "4 tensors")


def test_shard_that_is_a_folder_is_missing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, ABC, {}, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    (tmp_path / "model-00002-of-00003.safetensors").mkdir()
    refused(tmp_path, "model-00002-of-00003.safetensors")


def test_numbered_files_without_index_must_be_complete(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, ABC, {}, shards=3, index=False)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused(tmp_path, "2 of the 3 files", "missing: 2")


def test_index_places_a_tensor_in_the_wrong_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": X, "b": X}, {}, shards={"1.safetensors": ["a"], "2.safetensors": ["b"]})
    write_index(tmp_path, {"a": "2.safetensors", "b": "2.safetensors"})
    refused(tmp_path, "tensor 'a' in 2.safetensors, but it is in 1.safetensors")


def test_index_names_a_tensor_that_no_file_has(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": X}, {})
    write_index(tmp_path, {"a": "model.safetensors", "ghost": "model.safetensors"})
    refused(tmp_path, "'ghost'", "model.safetensors", "no file holds it")


def test_indexed_file_holds_a_tensor_that_the_index_does_not_know(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, ABC, {})
    write_index(tmp_path, {"a": "model.safetensors", "b": "model.safetensors"})
    refused(tmp_path, "'c'", "model.safetensors")


def test_tensor_in_two_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, ABC, {}, shards={"1.safetensors": ["a", "b"], "2.safetensors": ["b", "c"]})
    refused(tmp_path, "1.safetensors", "2.safetensors", "'b'")


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "C:x.safetensors", "",
     "..", "a\0.safetensors", "model.bin", "./x.safetensors"],
)  # fmt: skip
def test_index_never_leads_out_of_the_folder(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, {"a": X}, {})
    write_file(tmp_path / "x.safetensors", {"evil": X})
    write_index(folder, {"a": "model.safetensors", "evil": file})
    refused(folder, "model.safetensors.index.json", "'evil'", repr(file), "plain file names")


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b"\xff",
     b'{"weight_map": {}, "weight_map": {}}'],
)  # fmt: skip
def test_damaged_index(tmp_path: Path, content: bytes) -> None:
    write_checkpoint(tmp_path, {"a": X}, {})
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    refused(tmp_path, "model.safetensors.index.json")


def test_duplicate_name_in_the_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": X}, {})
    text = '{"weight_map": {"a": "model.safetensors", "a": "other.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, "'a' twice")


# config.json


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b'{"a": "\xff"}', "not UTF-8 (byte 7"),
        (b"[1, 2]", "not an object"),
        (b"null", "not an object"),
        (b"{", "not a JSON object"),
        (b"", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "'a' twice"),
    ],
)
def test_damaged_config(tmp_path: Path, content: bytes, part: str) -> None:
    write_checkpoint(tmp_path, {"a": X})
    (tmp_path / "config.json").write_bytes(content)
    refused(tmp_path, "config.json", part)


def test_config_may_be_absent_or_hold_python_constants(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": X})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == {} and "config.json" in checkpoint.warnings[0]
    (tmp_path / "config.json").write_text(json.dumps({"limit": [0.0, float("inf")]}))
    assert open_checkpoint(tmp_path).config == {"limit": [0.0, float("inf")]}
