"""Operations of the model by themselves: rounding of inputs, experts of any formats, page memory, exponentials."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import quantkit_kernels as kernels
from quantkit_kernels.forward.twin.elementwise import sigmoid, silu
from quantkit_kernels.forward.weights import Fp8Weight, Int4Weight
from quantkit_serve.config import CacheConfig, ModelConfig
from quantkit_serve.model.kernel_ops import KernelOps, round_e4m3
from quantkit_serve.model.pages import GqaPages, pools, whole_page_bytes
from quantkit_serve.model.reference_ops import ReferenceOps
from quantkit_serve.model.weights import ExpertSet, PlainWeight, Stored
from tests.builders import e4m3_table


def made_up(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(kind: str, seed: int, rows: int, columns: int) -> Stored:
    values = (made_up(seed, rows, columns) * 0.1).numpy()
    if kind == "plain":
        return PlainWeight(torch.from_numpy(values).bfloat16())
    if kind == "int4":
        found = kernels.float_to_int4(values, group_size=32)
        return Int4Weight(
            torch.from_numpy(found.packed.view(np.int32)),
            torch.from_numpy(found.scale.view(np.int16)).view(torch.bfloat16),
        )
    codes, scales = kernels.float_to_fp8(values, (128, 128))
    return Fp8Weight(torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales))


def experts(kinds: tuple[str, str, str], count: int = 5) -> ExpertSet:
    gate, up, down = kinds
    return ExpertSet(
        [weight(gate, 3 * e, 96, 160) for e in range(count)],
        [weight(up, 3 * e + 1, 96, 160) for e in range(count)],
        [weight(down, 3 * e + 2, 160, 96) for e in range(count)],
    )


@pytest.mark.parametrize(
    "kinds, is_fused",
    [
        (("fp8", "fp8", "fp8"), True),
        (("int4", "int4", "int4"), True),
        (("plain", "plain", "plain"), False),
        (("int4", "int4", "fp8"), False),
        (("plain", "fp8", "int4"), False),
    ],
)
def test_experts_of_any_formats(kinds: tuple[str, str, str], is_fused: bool) -> None:
    chosen = experts(kinds)
    assert (chosen.fused is not None) == is_fused
    x = made_up(1, 7, 160).bfloat16()
    ids = torch.tensor([[0, 3], [4, 1], [2, 3], [0, 1], [1, 0], [3, 4], [2, 0]])
    scale = torch.rand(7, 2, generator=torch.Generator().manual_seed(2))
    exact = ReferenceOps(ModelConfig(), CacheConfig()).experts(x.float(), ids, scale, chosen)
    for settings in (ModelConfig(), ModelConfig(fp8_activations="dynamic128")):
        found = KernelOps(settings, CacheConfig()).experts(x, ids, scale, chosen)
        error = (found.float() - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
        rounds = settings.fp8_activations != "none" and "fp8" in kinds
        assert error < (0.06 if rounds else 0.01)
        assert error > 0.01 or not rounds


def test_inputs_are_rounded_as_a_loop_would() -> None:
    """Nearest of all e4m3 numbers, times the scale of their 128 values; the last block may be short."""
    x = made_up(3, 5, 300).bfloat16() * torch.logspace(-6, 6, 5)[:, None].bfloat16()
    x[2, 128:256] = 0
    found, table = round_e4m3(x), np.unique(e4m3_table()[~np.isnan(e4m3_table())].astype(np.float64))
    for row in range(5):
        for start in (0, 128, 256):
            block = x[row, start : start + 128].double().numpy()
            scale = np.float64(np.float32(np.abs(block).max()) / np.float32(448)) or 1.0
            nearest = table[np.abs(block[:, None] / scale - table).argmin(1)] * scale
            ours = found[row, start : start + 128].double().numpy()
            slack = (
                2.0**-8 * 1.01 * np.abs(block) + 1e-6 * scale
            )  # rounded to bfloat16, and ties may go either way
            assert (np.abs(ours - block) <= np.abs(nearest - block) + slack).all()
            is_clear = np.abs(nearest - block) < 0.4 * 2.0**-4 * np.abs(block)
            assert (np.abs(ours - nearest)[is_clear] <= slack[is_clear]).all()


@pytest.mark.parametrize(
    "function, exact", [(silu, lambda x: x / (1 + np.exp(-x))), (sigmoid, lambda x: 1 / (1 + np.exp(-x)))]
)
def test_exponentials_depend_on_nothing_but_the_value(function: object, exact: object) -> None:
    assert callable(function) and callable(exact)
    for columns in (1, 8, 100, 1408):
        x = made_up(columns, 90, columns) * 4
        whole = function(x)
        assert np.allclose(whole.numpy(), exact(x.double().numpy()), rtol=1e-5, atol=1e-7)
        assert torch.equal(whole, torch.cat([function(x[i : i + 1]) for i in range(90)]))
        assert torch.equal(whole[3:50], function(x[3:50]))


def test_layers_share_pages_and_no_byte() -> None:
    """Every layer's part of every page holds what was written there, whatever was written to the others."""
    ops = KernelOps(ModelConfig(), CacheConfig(page_size=4, kv_dtype="bf16"))
    layouts = [[ops.layout(GqaPages(1, 8))], [ops.layout(GqaPages(2, 3)), ops.layout(GqaPages(1, 5))]]
    memory = torch.zeros((6, whole_page_bytes(layouts)), dtype=torch.uint8)
    parts = [pool.pages for layer in pools(layouts, memory) for pool in layer]
    for number, part in enumerate(parts):
        for page in range(6):
            part[page] = 10 * number + page + 1
    for number, part in enumerate(parts):
        assert part.data_ptr() % 64 == memory.data_ptr() % 64
        for page in range(6):
            assert (part[page] == 10 * number + page + 1).all()
    with pytest.raises(ValueError, match="memory must be uint8"):
        pools(layouts, memory[:, :-1])
