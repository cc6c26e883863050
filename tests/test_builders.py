"""The test builders against torch and compressed-tensors, since much else rests on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized import unpack_from_int32

from tests.builders import FAMILIES, moe
from tests.rawfiles import Raw, e4m3_table, from_bf16, int4_group, to_bf16, to_e4m3


def test_e4m3_table_is_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    np.testing.assert_array_equal(e4m3_table(), codes.float().numpy())


def test_encoding_to_e4m3_is_nearest() -> None:
    x = np.random.default_rng(0).standard_normal(10_000).astype(np.float32) * np.geomspace(1e-3, 300, 10_000)
    ours = e4m3_table()[to_e4m3(x)]
    torchs = torch.from_numpy(x).float().to(torch.float8_e4m3fn).float().numpy()
    inside = np.abs(x) <= 448
    np.testing.assert_array_equal(np.abs(ours - x)[inside], np.abs(torchs - x)[inside])
    assert (np.abs(ours[~inside]) == 448).all()


def test_bf16_is_torchs() -> None:
    x = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    np.testing.assert_array_equal(from_bf16(to_bf16(x)), torch.from_numpy(x).bfloat16().float().numpy())


def test_int4_is_unpacked_by_compressed_tensors() -> None:
    w = np.random.default_rng(0).standard_normal((24, 256)).astype(np.float32)
    tensors = int4_group("m", w)
    packed = np.frombuffer(tensors["m.weight_packed"].data, "<i4").reshape(24, 32)
    q = unpack_from_int32(torch.from_numpy(packed.copy()), 4, torch.Size([24, 256])).numpy().astype(np.float32)
    scale = from_bf16(np.frombuffer(tensors["m.weight_scale"].data, "<u2").reshape(24, 8))
    assert np.abs(q * np.repeat(scale, 32, 1) - w).max() <= scale.max() * 0.51


@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_the_same_every_time(family: str) -> None:
    one, two, other = moe(family), moe(family), moe(family, seed=1)
    assert one == two and one[0] != other[0]
    assert all(isinstance(tensor, Raw) and len(tensor.data) for tensor in one[0].values())
