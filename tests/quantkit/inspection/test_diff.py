"""Differences between synthetic checkpoints whose true difference is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit.checkpoint import open_checkpoint
from quantkit.inspection import tiles
from quantkit.inspection.diff import Change, Difference, compare
from tests.builders import (
    Raw,
    bf16,
    f32,
    fp8,
    fp8_block,
    from_bf16,
    int4_group,
    to_bf16,
    write_checkpoint,
)  # fmt: skip

RNG = np.random.default_rng(6)
WEIGHT = (RNG.standard_normal((300, 192)) * 0.1).astype(np.float32)
NORM = bf16(np.ones(192, np.float32))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_VALUES", 1000)


def difference(folder: Path, a: dict[str, Raw], b: dict[str, Raw], **options: bool) -> Difference:
    config = {"model_type": "x"}
    with (
        open_checkpoint(write_checkpoint(folder / "a", a, config)) as first,
        open_checkpoint(write_checkpoint(folder / "b", b, config, shards=1)) as second,
    ):
        return compare(first, second, **options)


def only(found: Difference) -> Change:
    assert len(found.changes) == 1, found.changes
    return found.changes[0]


def test_the_same_is_the_same(tmp_path: Path) -> None:
    tensors = {**fp8_block("m", WEIGHT), "norm": NORM}
    found = difference(tmp_path, tensors, dict(reversed(tensors.items())))
    assert (found.identical, found.changes, found.unread) == (2, (), 0)


def test_a_renamed_scale_is_no_change(tmp_path: Path) -> None:
    found = difference(tmp_path, fp8_block("m", WEIGHT), fp8_block("m", WEIGHT, part="weight_scale"))
    assert (found.identical, found.changes) == (1, ())


def test_added_and_removed(tmp_path: Path) -> None:
    found = difference(tmp_path, {"norm": NORM, "old": NORM}, {"norm": NORM, "new": f32(WEIGHT)})
    assert found.changes == (
        Change("old", "removed", "BF16 [192]", None), Change("new", "added", None, "F32 [300, 192]"),
    )  # fmt: skip
    assert (found.count("added"), found.count("removed"), found.identical) == (1, 1, 1)


def test_another_storage_is_compared_by_value(tmp_path: Path) -> None:
    stored = int4_group("m", WEIGHT)
    words = np.frombuffer(stored["m.weight_packed"].data, "<u4").reshape(300, 24, 1)
    q = ((words >> (4 * np.arange(8, dtype=np.uint32))) & 15).astype(np.int32).reshape(300, 6, 32) - 8
    scale = from_bf16(np.frombuffer(stored["m.weight_scale"].data, np.uint16)).reshape(300, 6, 1)
    delta = WEIGHT.astype(np.float64) - (q * scale).reshape(300, 192)
    change = only(difference(tmp_path, {"m.weight": f32(WEIGHT)}, stored))
    assert (change.status, change.before, change.after) == ("changed", "F32 [300, 192]", "int4-group [300, 192]")
    expected = np.linalg.norm(delta) / np.linalg.norm(WEIGHT.astype(np.float64))
    assert change.relative_error == pytest.approx(expected, rel=1e-9)
    assert change.max_error == pytest.approx(np.abs(delta).max(), rel=1e-9)


def test_fp8_block_against_its_bf16_copy(tmp_path: Path) -> None:
    change = only(difference(tmp_path, fp8_block("m", WEIGHT), {"m.weight": bf16(WEIGHT)}))
    assert 0.01 < (change.relative_error or 0) < 0.04
    exact = only(difference(tmp_path / "x", {"m.weight": f32(WEIGHT)}, {"m.weight": bf16(WEIGHT)}))
    delta = np.abs(WEIGHT.astype(np.float64) - from_bf16(to_bf16(WEIGHT)))
    assert exact.max_error == pytest.approx(delta.max(), rel=1e-9)


def test_one_value_of_one_tensor(tmp_path: Path) -> None:
    changed = np.ones(192, np.float32)
    changed[100] = 2
    change = only(difference(tmp_path, {"norm": NORM}, {"norm": bf16(changed)}))
    assert (change.max_error, change.relative_error) == (1.0, pytest.approx(1 / np.sqrt(192)))


def test_one_byte_of_a_scale(tmp_path: Path) -> None:
    a = fp8_block("m", WEIGHT)
    b = dict(a)
    scales = np.frombuffer(a["m.weight_scale_inv"].data, np.float32).reshape(3, 2).copy()
    scales[2, 1] *= 2
    b["m.weight_scale_inv"] = f32(scales)
    assert (only(difference(tmp_path, a, b)).relative_error or 0) > 0


def test_other_shapes_have_no_error(tmp_path: Path) -> None:
    change = only(difference(tmp_path, {"m.weight": f32(WEIGHT)}, {"m.weight": f32(WEIGHT[:10])}))
    assert (change.before, change.after, change.relative_error) == ("F32 [300, 192]", "F32 [10, 192]", None)


def test_nan(tmp_path: Path) -> None:
    broken = WEIGHT.copy()
    broken[5, 5] = np.nan
    change = only(difference(tmp_path / "a", {"m.weight": f32(WEIGHT)}, {"m.weight": f32(broken)}))
    assert (change.relative_error, change.max_error) == (None, None)
    a = fp8_block("m", WEIGHT)
    codes = np.frombuffer(a["m.weight"].data, np.uint8).reshape(300, 192).copy()
    codes[299, 0] = 0xFF
    change = only(difference(tmp_path / "b", a, {**a, "m.weight": fp8(codes)}))
    assert (change.relative_error, change.max_error) == (None, None)


def test_zeros_and_signs_of_zero(tmp_path: Path) -> None:
    zero = np.zeros((4, 8), np.float32)
    change = only(difference(tmp_path, {"m.weight": f32(zero)}, {"m.weight": f32(-zero)}))
    assert (change.relative_error, change.max_error) == (0.0, 0.0)  # other bytes, the same numbers


def test_quick_reads_no_data(tmp_path: Path) -> None:
    a, b = {"m.weight": f32(WEIGHT), "n": NORM}, {"m.weight": f32(-WEIGHT), "n": f32(WEIGHT[0])}
    found = difference(tmp_path, a, b, quick=True)
    assert (found.unread, found.identical) == (1, 0)
    assert only(found) == Change("n", "changed", "BF16 [192]", "F32 [192]")
