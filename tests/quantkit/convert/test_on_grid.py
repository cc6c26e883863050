"""Codes read off another tool's numbers, against compressed-tensors' own packing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

import quantkit_kernels as kernels
from quantkit.convert.on_grid import int4_on_grid
from quantkit.errors import EnvironmentProblem


def rounded(rows: int, columns: int, group: int, *, signed: bool) -> tuple[Any, Any, Any, Any]:
    """A weight, its codes, the scales' bits, and code times scale in bfloat16, as tools hand it back."""
    rng = np.random.default_rng(rows + group)
    scale = torch.from_numpy(rng.uniform(0.001, 0.1, (rows, columns // group)).astype(np.float32)).bfloat16()
    if signed:
        scale = scale * torch.from_numpy(rng.choice([-1.0, 1.0], tuple(scale.shape))).bfloat16()
    codes = torch.from_numpy(rng.integers(-8, 8, (rows, columns)).astype(np.int8))
    wide = scale.repeat_interleave(group, 1)
    values = (codes.bfloat16() * wide).float().numpy()
    weight = (values + rng.normal(0, 0.02, values.shape)).astype(np.float32)
    return weight, codes, scale.view(torch.int16).numpy().view(np.uint16), values


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("signed", [False, True])
def test_packs_as_compressed_tensors_does(group: int, signed: bool) -> None:
    weight, codes, scale, values = rounded(24, 256, group, signed=signed)
    found = int4_on_grid(weight, values, scale, "m")
    assert np.array_equal(found.packed, pack_to_int32(codes, 4).numpy())
    assert found.scale is scale
    exact = codes.double().numpy() * kernels.bf16_to_float32(scale).astype(np.float64).repeat(group, 1)
    error = np.square(weight - exact).reshape(24, -1, group).sum(-1)
    energy = np.square(weight.astype(np.float64)).reshape(24, -1, group).sum(-1)
    assert np.allclose(found.error, error, rtol=1e-5) and np.allclose(found.energy, energy, rtol=1e-5)


def test_gives_back_our_own_rounding() -> None:
    weight = np.random.default_rng(1).normal(0, 0.02, (40, 128)).astype(np.float32)
    weight[3, 32:64] = 0  # a group of zeros
    ours = kernels.float_to_int4(weight, 32, "rtn")
    back = kernels.int4_to_float32(ours.packed, ours.scale, 128)
    found = int4_on_grid(weight, back, ours.scale, "m")
    for name in ("packed", "scale", "error", "energy"):
        assert np.array_equal(getattr(found, name), getattr(ours, name)), name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"values": 0.4}, "not codes from -8 to 7"),
        ({"values": 9.0}, "not codes from -8 to 7"),
        ({"values": np.nan}, "NaN or infinity"),
        ({"scale": 0x7F80}, "NaN or infinity"),
        ({"scale": 0}, "not codes from -8 to 7"),
        ({"columns": 96}, "shapes"),
        ({"rows": 23}, "shapes"),
    ],
)
def test_what_is_on_no_grid_is_refused(change: dict[str, Any], says: str) -> None:
    weight, _, scale, values = rounded(24, 128, 32, signed=False)
    if "values" in change:
        values[5, 7] = change["values"] * kernels.bf16_to_float32(scale)[5, 0]
    if "scale" in change:
        scale[5, 0] = change["scale"]
        values[5, 7] = 0.01
    values = values[: change.get("rows"), : change.get("columns")]
    with pytest.raises(EnvironmentProblem, match=f"model.layers.3: the engine returned .*{says}"):
        int4_on_grid(weight, values, scale, "model.layers.3")
