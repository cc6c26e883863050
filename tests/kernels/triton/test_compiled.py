"""Every Triton kernel compiles ahead of time for sm_90, in all configurations, without a GPU; none is left out."""

from __future__ import annotations

import pytest

from .compiled import Row, compile_for, kernel_names

SPILLS = 0  # bytes of a thread
SHARED = 227 * 1024  # bytes that a program may have on sm_90 and sm_100
REGISTERS = 65536  # of a processor


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return compile_for(90, tmp_path_factory.mktemp("sm90") / "rows.json")


def test_every_kernel_is_compiled(rows: list[Row]) -> None:
    assert kernel_names() and {row["kernel"] for row in rows} == kernel_names()


def test_every_kernel_fits_and_none_spills(rows: list[Row]) -> None:
    for row in rows:
        assert row["shared"] <= SHARED and row["registers"] * row["warps"] * 32 <= REGISTERS, row
        assert row["spilled"] <= SPILLS, row


def test_products_use_the_matrix_units_of_hopper(rows: list[Row]) -> None:
    products = [
        row for row in rows if "int4_l" in row["kernel"] or "fp8_l" in row["kernel"] or "mla" in row["kernel"]
    ]
    products += [row for row in rows if row["kernel"].endswith(("up_kernel", "down_kernel", "prefill_kernel"))]
    assert len(products) > 12
    for row in products:
        is_small = "BLOCK_H=16" in row["constants"] or "BLOCK_H=32" in row["constants"]
        wanted = "mma" if is_small else "wgmma"  # wgmma takes 64 rows
        assert row["tensor_core"] == wanted, row
