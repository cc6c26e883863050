"""Every Triton kernel compiles ahead of time for sm_100 as well, in one configuration each.

Some bytes of registers may spill: configurations were chosen for sm_90.
"""

from __future__ import annotations

from pathlib import Path

from .compiled import compile_for, kernel_names


def test_every_kernel_is_compiled(tmp_path: Path) -> None:
    rows = compile_for(100, tmp_path / "rows.json", "--one-each")
    assert {row["kernel"] for row in rows} == kernel_names()
    for row in rows:
        assert row["arch"] == 100 and row["spilled"] <= 128 and row["shared"] <= 227 * 1024, row
        assert row["tensor_memory"] <= 512, row  # more of it compiles to a trap
        is_product = row["kernel"].endswith(("linear_kernel", "up_kernel", "down_kernel", "prefill_kernel"))
        if is_product or row["kernel"] == "mla_kernel":
            assert row["tensor_core"] in ("tcgen05", "mma"), row
