"""Hostile sources, used as planning uses a source: one error, exit code 3, file and tensor named, a way out.

The parser's and the index's own cases stand in tests/quantkit/checkpoint; here each class of damage is done to an
otherwise whole model, and random damage must never be anything but an error of ours.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quantkit.checkpoint import open_checkpoint
from quantkit.errors import QuantkitError, SourceError
from tests.builders import moe, write_moe
from tests.rawfiles import Raw, f32, file_bytes, header_of, raw_bytes, write_checkpoint

EXPERT = "model.layers.1.mlp.experts.0.up_proj"
FIRST, SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"


def use(folder: Path) -> None:
    """What planning and dequantizing ask of a source."""
    with open_checkpoint(folder) as checkpoint:
        for weight in checkpoint.weights().values():
            if weight.scale is not None:
                checkpoint.scales_float32(weight)


def rewrite(folder: Path, change: Callable[[dict[str, Raw]], None]) -> None:
    tensors, config = moe("glm_moe_dsa")
    change(tensors)
    shutil.rmtree(folder)
    write_checkpoint(folder, tensors, config, shards=3)


def truncated(folder: Path) -> tuple[str, ...]:
    os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 1)
    return (SECOND, "truncated", "tensor '", "again")


def empty_shard(folder: Path) -> tuple[str, ...]:
    (folder / SECOND).write_bytes(b"")
    return (SECOND, "too few", "again")


def header_over_the_limit(folder: Path) -> tuple[str, ...]:
    content = bytearray((folder / FIRST).read_bytes())
    content[:8] = (1 << 40).to_bytes(8, "little")
    (folder / FIRST).write_bytes(content)
    return (FIRST, "1,099,511,627,776", "100,000,000")


def reheaded(folder: Path, change: Callable[[dict[str, dict[str, object]]], str]) -> str:
    """Change the header of the first file; its data stay."""
    content = (folder / FIRST).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = change(header)
    (folder / FIRST).write_bytes(raw_bytes(text, content[8 + length :]))
    return next(name for name in header if name != "__metadata__")


def duplicate_key(folder: Path) -> tuple[str, ...]:
    def change(header: dict[str, dict[str, object]]) -> str:
        name = next(n for n in header if n != "__metadata__")
        return json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"

    return (FIRST, repr(reheaded(folder, change)), "twice")


def overlapping(folder: Path) -> tuple[str, ...]:
    def change(header: dict[str, dict[str, object]]) -> str:
        entries = [e for n, e in header.items() if n != "__metadata__"]
        one = next(e for e in entries if e["data_offsets"][0] > 0)  # type: ignore[index]
        begin, end = one["data_offsets"]  # type: ignore[misc]
        one["data_offsets"] = [begin - 2, end - 2]
        return json.dumps(header)

    reheaded(folder, change)
    return (FIRST, "overlap", "tensor '")


def missing_shard(folder: Path) -> tuple[str, ...]:
    (folder / SECOND).unlink()
    return ("model.safetensors.index.json", SECOND, "would be lost", "Download")


def tensor_in_two_shards(folder: Path) -> tuple[str, ...]:
    (folder / "extra.safetensors").write_bytes(file_bytes({f"{EXPERT}.weight": f32(np.zeros((2, 2)))}))
    return ("extra.safetensors", f"{EXPERT}.weight", "as well", "Remove")


def missing_scale(folder: Path) -> tuple[str, ...]:
    rewrite(folder, lambda t: t.pop(f"{EXPERT}.weight_scale_inv") and None)
    return ("safetensors", f"{EXPERT}.weight", "without a scale", "never cast")


def scale_of_wrong_shape(folder: Path) -> tuple[str, ...]:
    rewrite(folder, lambda t: t.update({f"{EXPERT}.weight_scale_inv": f32(np.ones((1, 1)))}))
    return ("safetensors", f"{EXPERT}.weight_scale_inv", "[1, 1]", "[1, 2]", "weight_block_size")


def nan_in_scale(folder: Path) -> tuple[str, ...]:
    rewrite(folder, lambda t: t.update({f"{EXPERT}.weight_scale_inv": f32(np.array([[1, np.nan]]))}))
    return ("safetensors", f"{EXPERT}.weight_scale_inv", "[0, 1]: nan")


def transposed_scale(folder: Path) -> tuple[str, ...]:
    rewrite(folder, lambda t: t.update({f"{EXPERT}.weight_scale_inv": f32(np.ones((2, 1)))}))
    return (f"{EXPERT}.weight_scale_inv", "[2, 1]", "[1, 2]")


def config_not_utf8(folder: Path) -> tuple[str, ...]:
    (folder / "config.json").write_bytes('{"name": "Änderung"}'.encode("latin-1"))
    return ("config.json", "UTF-8", "byte 10", "Restore")


def link_to_nowhere(folder: Path) -> tuple[str, ...]:
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to("/no/such/blob")
    return (SECOND, "leads nowhere", "/no/such/blob")


def link_to_itself(folder: Path) -> tuple[str, ...]:
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to(SECOND)
    return (SECOND, "leads nowhere")


def index_leads_out(folder: Path) -> tuple[str, ...]:
    (folder.parent / "outside.safetensors").write_bytes(file_bytes({"x": f32(np.zeros(1))}))
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["x"] = "../outside.safetensors"
    path.write_text(json.dumps(index))
    return ("model.safetensors.index.json", "'x'", "'../outside.safetensors'", "one folder")


def lfs_pointer(folder: Path) -> tuple[str, ...]:
    (folder / FIRST).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    return (FIRST, "Git LFS pointer", "git lfs pull")


def html_page(folder: Path) -> tuple[str, ...]:
    (folder / FIRST).write_text("<!DOCTYPE html><html><body>502 Bad Gateway</body></html>" * 9)
    return (FIRST, "over the format's limit")


CASES = [
    truncated, empty_shard, header_over_the_limit, duplicate_key, overlapping, missing_shard, tensor_in_two_shards,
    missing_scale, scale_of_wrong_shape, transposed_scale, nan_in_scale, config_not_utf8, link_to_nowhere,
    link_to_itself, index_leads_out, lfs_pointer, html_page,
]  # fmt: skip


@pytest.mark.parametrize("damage", CASES, ids=lambda case: case.__name__)
def test_one_clear_error(tmp_path: Path, damage: Callable[[Path], tuple[str, ...]]) -> None:
    folder = write_moe(tmp_path / "model", "glm_moe_dsa", shards=3)
    use(folder)
    parts = damage(folder)
    with pytest.raises(SourceError) as caught:
        use(folder)
    message = str(caught.value)
    assert caught.value.exit_code == 3
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
    assert caught.value.hint, message
    assert "\n" not in message and len(message) < 700


def test_shard_outside_the_index_is_read_and_told(tmp_path: Path) -> None:
    folder = write_moe(tmp_path / "model", "glm_moe_dsa", shards=3)
    (folder / "mtp.safetensors").write_bytes(file_bytes({"mtp.x": f32(np.zeros(1))}))
    with open_checkpoint(folder) as checkpoint:
        assert "mtp.x" in checkpoint.tensors and "mtp.safetensors" in checkpoint.warnings[0]


def test_symlinked_files_are_read(tmp_path: Path) -> None:
    folder = write_moe(tmp_path / "blobs", "qwen3_moe", shards=3)
    (tmp_path / "snapshot").mkdir()
    for path in folder.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    with open_checkpoint(folder) as one, open_checkpoint(tmp_path / "snapshot") as two:
        assert one.fingerprint == two.fingerprint and one.side_files == two.side_files


def test_tensor_names_never_touch_the_file_system(tmp_path: Path) -> None:
    names = ["../../evil.weight", "/etc/evil.weight", "a/../b.weight", "~.weight"]
    folder = write_checkpoint(tmp_path / "model", {name: f32(np.ones((2, 2))) for name in names}, {}, index=True)
    before = sorted(tmp_path.rglob("*"))
    with open_checkpoint(folder) as checkpoint:
        assert sorted(checkpoint.tensors) == sorted(names)
        assert all(checkpoint.array(name).sum() == 4 for name in names)
        assert len(checkpoint.weights()) == 4
    assert sorted(tmp_path.rglob("*")) == before


def test_weights_of_zeros_and_one_expert_only_are_fine(tmp_path: Path) -> None:
    tensors, config = moe("qwen3_moe", experts=1)
    for name, tensor in list(tensors.items()):
        tensors[name] = Raw(tensor.dtype, tensor.shape, bytes(len(tensor.data)))
    use(write_checkpoint(tmp_path, tensors, config))


@pytest.mark.parametrize("seed", range(60))
def test_random_damage_is_an_error_of_ours_or_harmless(tmp_path: Path, seed: int) -> None:
    """Flip, cut or insert bytes in the header, the index or the config: no other exception, no silent loss."""
    rng = random.Random(seed)
    tensors = {f"m{i}.weight": f32(np.full((2, 2), i, np.float32)) for i in range(6)}
    folder = write_checkpoint(tmp_path / "model", tensors, {"quantization_config": {}}, shards=2)
    path = rng.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    limit = len(content) if path.suffix == ".json" else 8 + len(json.dumps(header_of(tensors)))
    for _ in range(rng.randint(1, 3)):
        position = rng.randrange(min(limit, len(content)))
        kind = rng.choice(["flip", "cut", "insert"])
        if kind == "flip":
            content[position] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del content[position : position + rng.randint(1, 9)]
        else:
            content[position:position] = rng.randbytes(rng.randint(1, 9))
    path.write_bytes(content)
    try:
        with open_checkpoint(folder) as checkpoint:
            checkpoint.weights()
            total = checkpoint.nbytes
    except QuantkitError as error:
        assert error.exit_code == 3 and path.name in str(error), str(error)
    else:
        assert total == 6 * 16
