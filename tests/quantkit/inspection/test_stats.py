"""Statistics against numpy over the whole tensor; tiles made small so that there are several."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit.checkpoint import open_checkpoint
from quantkit.errors import UnsupportedError, UsageError
from quantkit.inspection import tiles
from quantkit.inspection.stats import BINS, TensorStatistics, tensor_statistics
from tests.builders import (
    Raw,
    bf16,
    e4m3_table,
    f32,
    fp8,
    fp8_block,
    fp8_channel,
    from_bf16,
    int4_group,
    to_bf16,
    write_checkpoint,
    zeros,
)  # fmt: skip

RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_VALUES", 1000)


def statistics(folder: Path, tensors: dict[str, Raw], name: str) -> TensorStatistics:
    with open_checkpoint(write_checkpoint(folder, tensors, {"model_type": "x"})) as checkpoint:
        return tensor_statistics(checkpoint, name)


def agrees(found: TensorStatistics, values: np.ndarray) -> None:
    finite = values[np.isfinite(values)].astype(np.float64)
    assert (found.count, found.nan) == (values.size, int(np.isnan(values).sum()))
    assert (found.inf, found.zeros) == (int(np.isinf(values).sum()), int((finite == 0).sum()))
    assert (found.minimum, found.maximum) == (finite.min(), finite.max())
    expected = (finite.mean(), finite.std(), np.sqrt((finite**2).mean()))
    np.testing.assert_allclose((found.mean, found.std, found.rms), expected, rtol=1e-9, atol=1e-12)
    counts = np.histogram(finite, BINS, (finite.min(), finite.max()))[0]
    assert found.histogram == tuple(counts)


WEIGHT = (RNG.standard_normal((300, 192)) * 0.1 + 0.02).astype(np.float32)


def test_fp8_block_with_partial_blocks(tmp_path: Path) -> None:
    stored = fp8_block("m", WEIGHT)
    codes = np.frombuffer(stored["m.weight"].data, np.uint8).reshape(300, 192)
    scales = np.frombuffer(stored["m.weight_scale_inv"].data, np.float32).reshape(3, 2)
    whole = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:300, :192]
    found = statistics(tmp_path, stored, "m")
    agrees(found, e4m3_table()[codes] * whole)
    assert (found.storage, found.shape, len(found.parts)) == ("fp8-block", (300, 192), 2)


def test_fp8_channel(tmp_path: Path) -> None:
    stored = fp8_channel("m", WEIGHT)
    codes = np.frombuffer(stored["m.weight"].data, np.uint8).reshape(300, 192)
    scale = from_bf16(np.frombuffer(stored["m.weight_scale"].data, np.uint16)).reshape(300, 1)
    agrees(statistics(tmp_path, stored, "m.weight"), e4m3_table()[codes] * scale)


def test_int4(tmp_path: Path) -> None:
    stored = int4_group("m", WEIGHT)
    words = np.frombuffer(stored["m.weight_packed"].data, "<u4").reshape(300, 24, 1)
    q = ((words >> (4 * np.arange(8, dtype=np.uint32))) & 15).astype(np.int32).reshape(300, 6, 32) - 8
    scale = from_bf16(np.frombuffer(stored["m.weight_scale"].data, np.uint16)).reshape(300, 6, 1)
    agrees(statistics(tmp_path, stored, "m"), (q * scale).reshape(300, 192))


def test_source_name_of_a_packed_weight(tmp_path: Path) -> None:
    """Reports and tensors.jsonl call it so."""
    stored = int4_group("m", WEIGHT)
    found = statistics(tmp_path / "a", stored, "m.weight")
    assert found == statistics(tmp_path / "b", stored, "m")
    with pytest.raises(UsageError):
        statistics(tmp_path / "c", stored, "x.weight")


def test_plain_dtypes(tmp_path: Path) -> None:
    agrees(statistics(tmp_path / "a", {"m.weight": bf16(WEIGHT)}, "m"), from_bf16(to_bf16(WEIGHT)))
    agrees(statistics(tmp_path / "b", {"m.weight": f32(WEIGHT)}, "m.weight"), WEIGHT)
    agrees(statistics(tmp_path / "c", {"bias": f32(WEIGHT[0])}, "bias"), WEIGHT[0])
    whole = RNG.integers(-9, 9, (50, 60))
    raw = Raw("I64", whole.shape, whole.astype("<i8").tobytes())
    agrees(statistics(tmp_path / "d", {"n": raw}, "n"), whole)


def test_numbers_that_are_none(tmp_path: Path) -> None:
    broken = WEIGHT.copy()
    broken[7, 3], broken[250, 0], broken[9, 9], broken[100] = np.nan, np.inf, -np.inf, 0
    agrees(statistics(tmp_path, {"m.weight": f32(broken)}, "m"), broken)


def test_nan_codes_of_fp8_are_counted_not_refused(tmp_path: Path) -> None:
    stored = fp8_block("m", WEIGHT)
    codes = np.frombuffer(stored["m.weight"].data, np.uint8).reshape(300, 192).copy()
    codes[299, 191], codes[0, 0] = 0x7F, 0xFF
    found = statistics(tmp_path, {**stored, "m.weight": fp8(codes)}, "m")
    assert (found.nan, found.count) == (2, 300 * 192)
    assert sum(found.histogram) == found.count - 2


def test_all_codes_as_stored(tmp_path: Path) -> None:
    # Without a scale it is no weight: a one-dimensional tensor of codes is shown as its own numbers.
    found = statistics(tmp_path, {"codes": fp8(np.arange(256, dtype=np.uint8))}, "codes")
    agrees(found, e4m3_table())


def test_constant_and_empty(tmp_path: Path) -> None:
    found = statistics(tmp_path / "a", {"m.weight": f32(np.full((3, 4), 2.5, np.float32))}, "m")
    assert (found.histogram, found.std, found.minimum) == ((12,), 0.0, 2.5)
    found = statistics(tmp_path / "b", {"n": f32(np.zeros((0,), np.float32)), "m.weight": f32(WEIGHT)}, "n")
    assert (found.count, found.histogram, found.mean) == (0, (), None)
    found.to_json()


def test_scales_are_shown_as_stored(tmp_path: Path) -> None:
    stored = fp8_block("m", WEIGHT)
    scales = np.frombuffer(stored["m.weight_scale_inv"].data, np.float32)
    found = statistics(tmp_path, stored, "m.weight_scale_inv")
    assert (found.count, found.maximum, found.storage) == (6, scales.max(), "plain")


def test_what_cannot_be_shown(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Did you mean"):
        statistics(tmp_path / "a", fp8_block("model.up_proj", WEIGHT), "model.up_prj")
    with pytest.raises(UnsupportedError, match="C64"):
        statistics(tmp_path / "b", {"z": zeros("C64", (4,), 8), "m.weight": f32(WEIGHT)}, "z")
