"""Opening whole checkpoints: sources, files, tensors, bytes, side files, fingerprint."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from quantkit.checkpoint import BUNDLED, Checkpoint, open_checkpoint
from quantkit.checkpoint.local import LocalStore
from quantkit.checkpoint.tensor import Storage
from quantkit.errors import SourceError, UnsupportedError, UsageError
from tests.builders import FAMILIES, moe, write_moe
from tests.rawfiles import Raw, bf16, f32, write_checkpoint, write_file


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("storage", [None, "bf16"])
def test_every_family_opens_and_every_byte_is_found(tmp_path: Path, family: str, storage: str | None) -> None:
    tensors, config = moe(family, storage=storage)
    write_moe(tmp_path, family, storage=storage)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config == config and checkpoint.warnings == ()
        assert checkpoint.tensors.keys() == tensors.keys()
        assert checkpoint.nbytes == sum(len(t.data) for t in tensors.values())
        for name, tensor in tensors.items():
            info = checkpoint.tensors[name]
            assert (info.dtype, info.shape, info.nbytes) == (tensor.dtype, tensor.shape, len(tensor.data))
            assert checkpoint.read(name).tobytes() == tensor.data
        places = [(t.file, t.offset) for t in checkpoint.tensors.values()]
        assert places == sorted(places)


def test_bundled_models_are_read_as_the_library_reads_them() -> None:
    for name in BUNDLED:
        checkpoint = open_checkpoint(name)
        assert (checkpoint.label, checkpoint.kind, checkpoint.revision) == (name, "bundled", None)
        file = next(iter(checkpoint.files))
        path = checkpoint.local_path(file)
        assert path is not None
        for info in (t for t in checkpoint.tensors.values() if t.file == file and t.dtype == "F32"):
            np.testing.assert_array_equal(checkpoint.array(info), _load_f32(path, info.name))
            break
        assert {"tokenizer.json", "config.json"} <= {side.name for side in checkpoint.side_files}
        stored = {w.storage for w in checkpoint.weights().values()}
        assert stored == {Storage.FP8_BLOCK, Storage.PLAIN}


def _load_f32(path: Path, name: str) -> np.ndarray:
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        return file.get_tensor(name)


def test_arrays_have_raw_dtypes(tmp_path: Path) -> None:
    arrays = {
        "f16": np.arange(6, dtype=np.float16).reshape(2, 3), "f32": np.float32(3.5).reshape(()),
        "i32": np.arange(4, dtype=np.int32), "i64": np.arange(2, dtype=np.int64),
        "u8": np.arange(3, dtype=np.uint8),
    }  # fmt: skip
    dtypes = {"f16": "F16", "f32": "F32", "i32": "I32", "i64": "I64", "u8": "U8"}
    tensors = {n: Raw(dtypes[n], a.shape, a.tobytes()) for n, a in arrays.items()}
    tensors |= {
        "bf": bf16(np.array([1.5])),
        "f8": Raw("F8_E4M3", (2,), b"\x38\x7f"),
        "f4": Raw("F4", (2, 2), b"ab"),
    }
    write_checkpoint(tmp_path, tensors)
    checkpoint = open_checkpoint(tmp_path)
    for name, array in arrays.items():
        read = checkpoint.array(name)
        assert read.dtype == array.dtype and read.shape == array.shape
        np.testing.assert_array_equal(read, array)
    assert checkpoint.array("bf").dtype == np.uint16 and checkpoint.array("bf")[0] == 0x3FC0
    assert checkpoint.array("f8").tolist() == [0x38, 0x7F]
    assert checkpoint.array("f4").tolist() == [97, 98]
    names = ["f16", "f32", "i32", "i64", "u8"]
    loaded = load_file(write_file(tmp_path / "again.st", {n: tensors[n] for n in names}))
    assert all(np.array_equal(loaded[n], arrays[n]) for n in names)


def test_ranges_inside_a_tensor(tmp_path: Path) -> None:
    data = bytes(range(100))
    write_checkpoint(tmp_path, {"a": f32(np.zeros(3)), "b": Raw("U8", (100,), data), "c": f32(np.zeros(3))})
    checkpoint = open_checkpoint(tmp_path)
    assert bytes(checkpoint.read_range("b", 10, 20)) == data[10:20]
    assert bytes(checkpoint.read_range("b", 100, 100)) == b""
    buffer = np.zeros(5, np.uint8)
    checkpoint.read_into("b", 95, buffer.data)
    assert buffer.tolist() == [95, 96, 97, 98, 99]
    for start, stop in ((-1, 5), (90, 101), (20, 10)):
        with pytest.raises(ValueError, match="outside of 'b'"):
            checkpoint.read_range("b", start, stop)
    with pytest.raises(ValueError, match="outside of 'b'"):
        checkpoint.read_into("b", 96, buffer.data)
    with pytest.raises(UsageError, match=r"no tensor 'bb'.*Did you mean 'b'"):
        checkpoint.read("bb")


class Counting(LocalStore):
    """Counts the bytes read of every file."""

    def readinto(self, name: str, offset: int, buffer: memoryview) -> None:
        self.total = getattr(self, "total", 0) + buffer.nbytes
        super().readinto(name, offset, buffer)


def test_opening_reads_no_data_and_reading_only_what_is_asked(tmp_path: Path) -> None:
    shape = (1 << 20,)
    write_checkpoint(tmp_path, {"a": Raw("U8", shape, bytes(shape[0])), "b": Raw("U8", shape, bytes(shape[0]))})
    store = Counting(tmp_path)
    checkpoint = Checkpoint(store)
    assert store.total <= 128 * 1024
    checkpoint.weights()
    before = store.total
    checkpoint.read_range("b", 5, 105)
    assert store.total - before == 100


def test_threads_read_the_right_bytes(tmp_path: Path) -> None:
    tensors, _ = moe("glm_moe_dsa")
    write_moe(tmp_path, "glm_moe_dsa", shards=12)
    checkpoint = Checkpoint(LocalStore(tmp_path, max_open=3))
    names = list(tensors) * 4
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda name: checkpoint.read(name).tobytes(), names))
    assert all(data == tensors[name].data for name, data in zip(names, read, strict=True))


def test_twenty_thousand_tensors_in_sparse_files(tmp_path: Path) -> None:
    header = {
        f"model.layers.{i // 400}.mlp.experts.{i % 400}.up_proj.weight": {
            "dtype": "BF16", "shape": [2048, 6144], "data_offsets": [i * 25165824, (i + 1) * 25165824],
        }
        for i in range(20_000)
    }  # fmt: skip
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 20_000 * 25165824)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.nbytes == 20_000 * 25165824
    infos = list(checkpoint.tensors.values())
    assert (
        len({id(t.file) for t in infos})
        == len({id(t.shape) for t in infos})
        == len({id(t.dtype) for t in infos})
        == 1
    )
    assert not hasattr(infos[0], "__dict__")


# side files


def test_side_files(tmp_path: Path) -> None:
    side = {
        "tokenizer.json": b"{}", "modeling_x.py": b"", "LICENSE": b"MIT", "chat_template.jinja": b"x",
        "figures/a.png": b"p",
        ".gitattributes": b"x", ".cache/x": b"x", "pytorch_model.bin": b"x", "x.gguf": b"x", "model.pt": b"x",
        "pytorch_model.bin.index.json": b"{}", "original/consolidated.00.pth": b"x", "original/params.json": b"{}",
        "out/decode/model-other.safetensors": b"x", "out/manifest.json": b"{}",
    }  # fmt: skip
    write_checkpoint(tmp_path, {"a": f32(np.zeros(3))}, {}, index=True, side_files=side)
    checkpoint = open_checkpoint(tmp_path)
    kept = ["LICENSE", "chat_template.jinja", "config.json", "figures/a.png", "modeling_x.py", "tokenizer.json"]
    assert [s.name for s in checkpoint.side_files] == kept
    assert {s.name: s.nbytes for s in checkpoint.side_files}["LICENSE"] == 3
    assert checkpoint.side_bytes("LICENSE") == b"MIT"
    assert [w for w in checkpoint.warnings if "model.pt and 2 more" in w]
    assert [w for w in checkpoint.warnings if "original/" in w] and [w for w in checkpoint.warnings if "out/" in w]
    with pytest.raises(SourceError, match="absent"):
        checkpoint.side_bytes("absent")


def test_huge_side_file_is_left_out_with_a_warning(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": f32(np.zeros(3))}, {})
    with open(tmp_path / "dump.tar", "wb") as file:
        file.truncate((1 << 30) + 1)
    checkpoint = open_checkpoint(tmp_path)
    assert [s.name for s in checkpoint.side_files] == ["config.json"]
    assert "dump.tar" in checkpoint.warnings[0]


# fingerprint


def test_fingerprint_tells_headers_and_config_apart_but_not_places(tmp_path: Path) -> None:
    tensors, config = moe("qwen3_moe")

    def fingerprint(folder: str, **options: Any) -> str:
        path = write_checkpoint(
            tmp_path / folder, options.pop("tensors", tensors), options.pop("config", config), **options
        )  # type: ignore[arg-type]
        return open_checkpoint(path).fingerprint

    same = fingerprint("a")
    assert fingerprint("b", side_files={"README.md": b"other"}) == same
    assert fingerprint("c", shards=2) != same
    assert fingerprint("d", config=config | {"rms_norm_eps": 1e-5}) != same
    renamed = dict(tensors)
    renamed["model.norm.weight2"] = renamed.pop("model.norm.weight")
    assert fingerprint("e", tensors=renamed) != same


def test_fingerprint_by_the_letter(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": f32(np.zeros(1))}, {"x": 1})
    content = (tmp_path / "model.safetensors").read_bytes()
    header = hashlib.sha256(content[:-4]).hexdigest()
    rows = f'[["model.safetensors",{len(content)},"{header}",null]]\n'.encode()
    expected = hashlib.sha256(rows + (tmp_path / "config.json").read_bytes()).hexdigest()
    assert open_checkpoint(tmp_path).fingerprint == expected


# sources


def test_a_single_file_with_the_config_beside_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": f32(np.zeros(3))}, {"x": 1}, side_files={"tokenizer.json": b"{}"})
    write_file(tmp_path / "other.safetensors", {"b": f32(np.zeros(3))})
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    assert list(checkpoint.tensors) == ["a"] and checkpoint.config == {"x": 1}
    assert "give the folder" in checkpoint.warnings[0]


def test_an_existing_path_goes_before_a_bundled_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "tiny-glm", {"a": f32(np.zeros(3))}, {})
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("tiny-glm").kind == "local"


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("tiny-gml", "Did you mean tiny-glm?"),
        ("/no/such/place", "no such file, folder or model"),
        ("./nothing", "no such file"),
        ("", "no such file"),
        ("a/b/c", "no such file"),
        ("https://huggingface.co/zai-org/GLM-5.2-FP8/tree/main", "zai-org/GLM-5.2-FP8"),
    ],
)
def test_nothing_of_this_name(source: str, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_checkpoint(source)
    assert part in str(caught.value) and caught.value.exit_code == 2
    assert "tiny-qwen3" in str(caught.value)


def test_revision_is_for_the_hub(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": f32(np.zeros(3))}, {})
    for source in (tmp_path, "tiny-glm"):
        with pytest.raises(UsageError, match="not a hub repository"):
            open_checkpoint(source, revision="main")


def test_an_artifact_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "decode").mkdir()
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UnsupportedError, match=r"quantkit artifact.*decode"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({}, "holds no safetensors file"),
        ({"pytorch_model.bin": b"x"}, "pytorch_model.bin"),
        ({"model.gguf": b"x"}, "model.gguf"),
        ({"sub/model.safetensors": b"x"}, "open that folder"),
    ],
)
def test_a_folder_without_safetensors(tmp_path: Path, files: dict[str, bytes], part: str) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UnsupportedError) as caught:
        open_checkpoint(tmp_path)
    assert part in str(caught.value) and caught.value.exit_code == 3


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedError, match=r"model.gguf: is not a safetensors file"):
        open_checkpoint(tmp_path / "model.gguf")


def test_links_are_resolved_for_hard_links(tmp_path: Path) -> None:
    blob = write_file(tmp_path / "blob", {"a": f32(np.zeros(3))})
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blob")
    checkpoint = open_checkpoint(tmp_path / "snapshot")
    assert checkpoint.local_path("model.safetensors") == checkpoint.fetch("model.safetensors") == blob.resolve()
    checkpoint.release("model.safetensors")
    with pytest.raises(UsageError):
        checkpoint.consume("model.safetensors")


def test_reading_imports_no_torch() -> None:
    code = (
        "import sys; from quantkit.checkpoint import open_checkpoint; c = open_checkpoint('tiny-glm')\n"
        "[c.scales_float32(w) for w in c.weights().values() if w.scale]\n"
        "assert not {'torch', 'safetensors', 'huggingface_hub'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
