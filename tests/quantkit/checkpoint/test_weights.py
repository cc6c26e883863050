"""Pairing of weights and scales, their layouts, and the scales themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.checkpoint import Checkpoint, Storage, StoredWeight, open_checkpoint
from quantkit.checkpoint.scales import decode_scales
from quantkit.errors import SourceError, UnsupportedError, UsageError
from tests.builders import moe, write_moe
from tests.rawfiles import (
    Raw,
    bf16,
    e4m3_table,
    expand,
    f32,
    fp8,
    fp8_block,
    fp8_channel,
    from_bf16,
    int4_group,
    write_checkpoint,
    zeros,
)

RNG = np.random.default_rng(7)
BLOCK = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
M = "model.layers.3.mlp.experts.0.up_proj"


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32) * np.float32(0.1)


def opened(
    folder: Path, tensors: dict[str, Raw], config: dict[str, Any] | None = None, **options: Any
) -> Checkpoint:
    return open_checkpoint(write_checkpoint(folder, tensors, BLOCK if config is None else config, **options))


def dense(checkpoint: Checkpoint, weight: StoredWeight) -> Any:
    """Float32 weight by the plainest means."""
    codes = checkpoint.array(weight.weight)
    if weight.storage is Storage.PLAIN:
        return from_bf16(codes) if weight.weight.dtype == "BF16" else codes.astype(np.float32)
    scales = checkpoint.scales_float32(weight)
    if weight.storage is Storage.INT4_GROUP:
        nibbles = codes.view(np.uint32)[:, :, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
        values = nibbles.reshape(weight.shape).astype(np.float32) - 8
    else:
        values = e4m3_table()[codes]
    return values * expand(scales, weight.block, weight.shape)


# layouts


@pytest.mark.parametrize("scale", ["F32", "BF16", "F8_E8M0"])
@pytest.mark.parametrize("part", ["weight_scale_inv", "weight_scale", "scale"])
@pytest.mark.parametrize("shape", [(128, 128), (144, 256), (576, 300), (1, 1), (64, 129)])
def test_blocks_of_every_scale_dtype_and_name(
    tmp_path: Path, scale: str, part: str, shape: tuple[int, int]
) -> None:
    w = normal(*shape)
    checkpoint = opened(tmp_path, fp8_block(M, w, scale=scale, part=part))
    weight = checkpoint.weight(M)
    assert (weight.storage, weight.shape, weight.block) == (Storage.FP8_BLOCK, shape, (128, 128))
    assert [t.name for t in weight.parts] == [f"{M}.weight", f"{M}.{part}"]
    grid = checkpoint.scales_float32(weight)
    assert grid.shape == (-(-shape[0] // 128), -(-shape[1] // 128)) and grid.dtype == np.float32
    error = np.abs(dense(checkpoint, weight) - w)
    assert (error <= np.abs(w) / 16 + np.abs(w).max() / 448 / 100).all()  # e4m3: half a step of 2**-3


def test_scale_in_another_file(tmp_path: Path) -> None:
    tensors = fp8_block(M, normal(144, 256))
    layout = {"1.safetensors": [f"{M}.weight"], "2.safetensors": [f"{M}.weight_scale_inv"]}
    weight = opened(tmp_path, tensors, shards=layout).weight(M)
    assert weight.scale is not None and (weight.weight.file, weight.scale.file) == (
        "1.safetensors",
        "2.safetensors",
    )


def test_block_size_comes_from_the_config_only(tmp_path: Path) -> None:
    w = normal(144, 256)
    config = {"quantization_config": {"weight_block_size": [64, 64]}}
    weight = opened(tmp_path / "a", fp8_block(M, w, block=64), config).weight(M)
    assert weight.block == (64, 64)
    # 3 x 4 scales would fit blocks of 48, 64 or 72 x 64: nothing declared means 128 and nothing else
    with pytest.raises(SourceError, match=r"\[3, 4\].*\[144, 256\].*\[2, 2\] per block"):
        opened(tmp_path / "b", fp8_block(M, w, block=64)).weights()
    with pytest.raises(SourceError, match=r"\[3, 4\]"):
        opened(tmp_path / "c", fp8_block(M, w, block=64), {}).weights()
    assert opened(tmp_path / "d", fp8_block(M, w), {}).weight(M).block == (128, 128)


@pytest.mark.parametrize("size", [128, [128], [0, 128], [128, -1], [128.0, 128], "128", [True, True]])
def test_block_size_must_be_a_pair(tmp_path: Path, size: object) -> None:
    with pytest.raises(SourceError, match=r"config.json: quantization_config.weight_block_size"):
        opened(tmp_path, {}, {"quantization_config": {"weight_block_size": size}}).weights()


def test_quantization_config_must_be_an_object(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"config.json: quantization_config is a list"):
        opened(tmp_path, {}, {"quantization_config": [1]}).weights()


def ct(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": group}}}


def test_channel_and_tensor_scales(tmp_path: Path) -> None:
    w = normal(96, 200)
    checkpoint = opened(tmp_path / "a", fp8_channel(M, w), ct(num_bits=8, type="float", strategy="channel"))
    weight = checkpoint.weight(M)
    assert (weight.storage, weight.block) == (Storage.FP8_CHANNEL, (1, 200))
    assert checkpoint.scales_float32(weight).shape == (96, 1)
    assert np.abs(dense(checkpoint, weight) - w).max() < np.abs(w).max() / 16
    for k, shape in enumerate([(), (1,), (1, 1)]):
        scale = np.full(shape, 0.5, np.float32)
        tensors = {f"{M}.weight": fp8(np.full((300, 8), 0x38)), f"{M}.weight_scale": f32(scale)}
        checkpoint = opened(tmp_path / f"t{k}", tensors, ct(num_bits=8, type="float", strategy="tensor"))
        weight = checkpoint.weight(M)
        assert (weight.storage, weight.block) == (Storage.FP8_TENSOR, (300, 8))
        assert checkpoint.scales_float32(weight).tolist() == [[0.5]]
        assert (dense(checkpoint, weight) == 0.5).all()


def test_channel_scales_where_blocks_are_declared(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"\[256, 1\].*\[2, 2\] per block \(blocks of 128 x 128\)"):
        opened(tmp_path, fp8_channel(M, normal(256, 256))).weights()


def test_compressed_tensors_blocks_beside_int4(tmp_path: Path) -> None:
    """The decode view that quantkit writes: block scales called weight_scale, INT4 experts."""
    config = {
        "quantization_config": {
            "config_groups": {
                "a": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}},
                "b": {
                    "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
                },
            }
        }
    }
    tensors = fp8_block("q", normal(144, 256), part="weight_scale") | int4_group(M, normal(8, 256), 64, "I64")
    weights = opened(tmp_path, tensors, config).weights()
    assert (weights["q"].storage, weights["q"].block) == (Storage.FP8_BLOCK, (128, 128))
    assert (weights[M].storage, weights[M].block) == (Storage.INT4_GROUP, (1, 64))


def test_two_declared_block_sizes(tmp_path: Path) -> None:
    groups = {
        str(n): {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [n, n]}}
        for n in (64, 128)
    }
    with pytest.raises(UnsupportedError, match="several block sizes"):
        opened(tmp_path, {}, {"quantization_config": {"config_groups": groups}}).weights()


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("says", [True, False])
def test_native_int4(tmp_path: Path, group: int, says: bool) -> None:
    w = normal(24, 256)
    config = ct(num_bits=4, type="int", strategy="group", group_size=group) if says else {}
    checkpoint = opened(tmp_path, int4_group(M, w, group), config)
    weight = checkpoint.weight(M)
    assert (weight.storage, weight.shape, weight.block) == (Storage.INT4_GROUP, (24, 256), (1, group))
    assert [t.name.rpartition(".")[2] for t in weight.parts] == ["weight_packed", "weight_scale", "weight_shape"]
    assert np.abs(dense(checkpoint, weight) - w).max() <= np.abs(w).max() / 7 * 0.51


def test_kimi_config_nested_in_text_config(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_moe(tmp_path, "kimi_k25"))
    assert "quantization_config" not in checkpoint.config
    weight = checkpoint.weight("language_model.model.layers.1.mlp.experts.3.down_proj")
    assert (weight.storage, weight.shape, weight.block) == (Storage.INT4_GROUP, (256, 128), (1, 32))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_plain_weights(tmp_path: Path, dtype: str) -> None:
    tensors = {f"{M}.weight": zeros(dtype, (8, 4), 4 if dtype == "F32" else 2), "norm.weight": f32(np.ones(4))}
    checkpoint = opened(tmp_path, tensors, {})
    assert list(checkpoint.weights()) == [M]
    weight = checkpoint.weight(M)
    assert (weight.storage, weight.scale, weight.block, weight.parts) == (
        Storage.PLAIN,
        None,
        (0, 0),
        (weight.weight,),
    )
    with pytest.raises(ValueError, match="no scales"):
        checkpoint.scales_float32(weight)


def test_every_tensor_of_a_real_layout_belongs_somewhere(tmp_path: Path) -> None:
    tensors, _ = moe("glm_moe_dsa")
    checkpoint = open_checkpoint(write_moe(tmp_path, "glm_moe_dsa"))
    parts = [t.name for w in checkpoint.weights().values() for t in w.parts]
    assert len(parts) == len(set(parts))
    left = set(tensors) - set(parts)
    assert all(len(tensors[name].shape) == 1 for name in left)
    assert checkpoint.weights() is checkpoint.weights()


def test_names_are_matched_whole(tmp_path: Path) -> None:
    """A scale of a module whose name merely contains ours is not ours."""
    tensors = fp8_block("a.up_proj_extra", normal(8, 8)) | {"a.up_proj.weight": fp8(np.zeros((8, 8)))}
    with pytest.raises(SourceError, match=r"'a.up_proj.weight': FP8 weight without a scale"):
        opened(tmp_path, tensors).weights()


# what is refused


def test_refused(tmp_path: Path) -> None:
    w = normal(256, 256)
    block = fp8_block(M, w)
    int4 = int4_group(M, w)
    packed = {"quantization_config": {}}
    cases: list[tuple[dict[str, Raw], type[SourceError], str]] = [
        ({f"{M}.weight": block[f"{M}.weight"]}, SourceError, "FP8 weight without a scale in any file"),
        (
            {f"{M}.weight_scale_inv": block[f"{M}.weight_scale_inv"]},
            SourceError,
            "the weight .* of this scale is missing",
        ),
        (block | {f"{M}.weight_scale": f32(np.ones((2, 2)))}, SourceError, "several scales"),
        (block | {f"{M}.weight_scale_inv": f32(np.ones((2, 3)))}, SourceError, r"\[2, 3\] does not fit.*\[2, 2\]"),
        (block | {f"{M}.weight_scale_inv": f32(np.ones(4))}, SourceError, r"\[4\] does not fit"),
        (block | {f"{M}.weight_scale_inv": zeros("I32", (2, 2), 4)}, UnsupportedError, "scale of dtype I32"),
        (block | {f"{M}.weight": bf16(w)}, SourceError, "is it applied already"),
        (block | int4, SourceError, "several scales"),
        (int4 | {f"{M}.weight": bf16(w)}, SourceError, "is it applied already"),
        (int4_group(M, w, 256) | {f"{M}.weight": fp8(np.zeros((256, 256)))}, SourceError, "stored twice"),
        ({f"{M}.weight": zeros("F8_E5M2", (8, 8), 1)}, UnsupportedError, "e5m2"),
        ({f"{M}.weight": zeros("I8", (8, 8), 1)}, UnsupportedError, "INT8"),
        ({f"{M}.weight": zeros("U8", (8, 8), 1)}, UnsupportedError, "NVFP4"),
        ({f"{M}.qweight": zeros("I32", (8, 8), 4)}, UnsupportedError, "GPTQ or AWQ"),
        ({f"{M}.codes": fp8(np.zeros((8, 8)))}, UnsupportedError, "does not end in .weight"),
        ({f"{M}.weight": fp8(np.zeros(8))}, UnsupportedError, r"FP8 codes of shape \[8\]"),
        ({k: v for k, v in int4.items() if "scale" not in k}, SourceError, f"without {M}.weight_scale"),
        ({k: v for k, v in int4.items() if "shape" not in k}, SourceError, f"without {M}.weight_shape"),
        (int4 | {f"{M}.weight_zero_point": zeros("I32", (1, 1), 4)}, UnsupportedError, "weight_zero_point"),
        (int4 | {f"{M}.weight_g_idx": zeros("I32", (1,), 4)}, UnsupportedError, "weight_g_idx"),
        (int4 | {f"{M}.weight_packed": zeros("U8", (256, 128), 1)}, UnsupportedError, "packed weight of dtype U8"),
        (int4 | {f"{M}.weight_shape": zeros("I32", (3,), 4)}, SourceError, "weight_shape is"),
        (int4 | {f"{M}.weight_scale": zeros("F8_E4M3", (256, 8), 1)}, UnsupportedError, "scale of dtype F8_E4M3"),
        (
            int4 | {f"{M}.weight_scale": bf16(np.ones((256, 7)))},
            SourceError,
            r"\[256, 7\].*\[256, 8\] for groups of 32",
        ),
        (int4 | {f"{M}.weight_scale": bf16(np.ones((255, 8)))}, SourceError, r"\[255, 8\]"),
    ]
    for k, (tensors, kind, part) in enumerate(cases):
        config = packed if any("packed" in name for name in tensors) else BLOCK
        with pytest.raises(kind, match=part) as caught:
            opened(tmp_path / str(k), tensors, config).weights()
        assert caught.value.exit_code == 3
        assert "model.safetensors, tensor" in str(caught.value) and M in str(caught.value), caught.value


def test_declared_group_size_must_fit(tmp_path: Path) -> None:
    config = ct(num_bits=4, type="int", strategy="group", group_size=128)
    with pytest.raises(SourceError, match=r"\[24, 8\].*\[24, 2\] for groups of 128"):
        opened(tmp_path, int4_group(M, normal(24, 256), 32), config).weights()


def test_packed_integers_of_eight_bits(tmp_path: Path) -> None:
    config = ct(num_bits=8, type="int", strategy="group", group_size=32)
    with pytest.raises(UnsupportedError, match=r"\[8\] bits"):
        opened(tmp_path, int4_group(M, normal(24, 256), 32), config).weights()


def test_weight_shape_is_held_against_the_packed_tensor(tmp_path: Path) -> None:
    tensors = int4_group(M, normal(24, 256))
    tensors[f"{M}.weight_shape"] = Raw("I32", (2,), np.array([24, 250], "<i4").tobytes())
    checkpoint = opened(tmp_path, tensors, {})
    with pytest.raises(SourceError, match=r"weight_shape': states the shape \[24, 250\].*\[24, 256\]"):
        checkpoint.scales_float32(checkpoint.weight(M))


def test_fused_experts_are_refused_only_when_asked_for(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": zeros("BF16", (4, 64, 32), 2),
        "model.layers.1.mlp.experts.gate_up_proj.weight": zeros("F8_E4M3", (4, 64, 32), 1),
        "norm.weight": f32(np.ones(4)),
    }
    checkpoint = opened(tmp_path, tensors)
    assert not checkpoint.weights()
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.gate_up_proj"):
        with pytest.raises(UnsupportedError, match=r"4 experts fused into one tensor of shape \[4, 64, 32\]"):
            checkpoint.weight(name)
    with pytest.raises(UsageError, match="not a two-dimensional weight"):
        checkpoint.weight("norm")
    with pytest.raises(UsageError, match="no weight 'nothing'"):
        checkpoint.weight("nothing")


# values of scales


def test_decoding_is_exact() -> None:
    codes = np.arange(256, dtype=np.uint8)
    decoded = decode_scales(codes, "F8_E8M0")
    assert np.isnan(decoded[255])
    assert all(float(decoded[code]) == 2.0 ** (code - 127) for code in range(255))
    bits = np.array([0x3F80, 0x0001, 0x7F80, 0xBF80], np.uint16)
    expected = np.array([0x3F800000, 0x00010000, 0x7F800000, 0xBF800000], np.uint32).view(np.float32)
    assert decode_scales(bits, "BF16").tobytes() == expected.tobytes()
    assert decode_scales(np.array([0.5, 2**-24], np.float16), "F16").tolist() == [0.5, 2**-24]


WRONG = [(s, v) for s in ("block", "int4") for v in (np.nan, np.inf, -np.inf, -1.0)]
WRONG.remove(("int4", -1.0))  # a quantizer may count down from 7 to -8


def test_a_group_of_int4_may_have_a_negative_scale(tmp_path: Path) -> None:
    scale = np.full((256, 8), -0.5, np.float32)
    checkpoint = opened(tmp_path, int4_group(M, normal(256, 256)) | {f"{M}.weight_scale": f32(scale)}, {})
    assert np.array_equal(checkpoint.scales_float32(checkpoint.weight(M)), scale)


@pytest.mark.parametrize(("storage", "value"), WRONG)
def test_scales_that_cannot_be_right(tmp_path: Path, value: float, storage: str) -> None:
    scale = np.ones((2, 2) if storage == "block" else (256, 8), np.float32)
    scale[1, 0] = value
    if storage == "block":
        tensors, name = fp8_block(M, normal(256, 256)), f"{M}.weight_scale_inv"
    else:
        tensors, name = int4_group(M, normal(256, 256)), f"{M}.weight_scale"
    tensors[name] = f32(scale)
    checkpoint = opened(tmp_path, tensors, {})
    with pytest.raises(SourceError, match=r"1 of .* scales cannot be right, the first at \[1, 0\]") as caught:
        checkpoint.scales_float32(checkpoint.weight(M))
    assert f"model.safetensors, tensor '{name}'" in str(caught.value) and caught.value.exit_code == 3


def test_nan_exponent(tmp_path: Path) -> None:
    tensors = fp8_block(M, normal(128, 128))
    tensors[f"{M}.weight_scale_inv"] = Raw("F8_E8M0", (1, 1), b"\xff")
    checkpoint = opened(tmp_path, tensors)
    with pytest.raises(SourceError, match="cannot be right"):
        checkpoint.scales_float32(checkpoint.weight(M))


def test_zero_scale_is_right_for_zeros_only(tmp_path: Path) -> None:
    codes = np.full((200, 300), 0x38, np.uint8)
    codes[128:, 256:] = 0
    codes[128, 256] = 0x80  # minus zero is zero
    scale = np.ones((2, 3), np.float32)
    scale[1, 2] = 0
    tensors = {f"{M}.weight": fp8(codes), f"{M}.weight_scale_inv": f32(scale)}
    checkpoint = opened(tmp_path / "a", tensors)
    assert checkpoint.scales_float32(checkpoint.weight(M))[1, 2] == 0
    codes[199, 299] = 1
    checkpoint = opened(tmp_path / "b", tensors | {f"{M}.weight": fp8(codes)})
    with pytest.raises(SourceError, match=r"scale \[1, 2\] is zero, but the codes of .*up_proj.weight under it"):
        checkpoint.scales_float32(checkpoint.weight(M))


def test_a_weight_of_zeros(tmp_path: Path) -> None:
    tensors = {f"{M}.weight": fp8(np.zeros((256, 256))), f"{M}.weight_scale_inv": f32(np.zeros((2, 2)))}
    checkpoint = opened(tmp_path, tensors)
    assert not checkpoint.scales_float32(checkpoint.weight(M)).any()
