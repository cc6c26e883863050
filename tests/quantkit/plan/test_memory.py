"""The memory budget: workers and tile shrink to fit, the formula is the documented one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.artifact import canonical
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import EnvironmentProblem, UsageError
from quantkit.plan import build_plan, memory
from quantkit.plan.memory import DEFAULT_TILE, SMALLEST_TILE, choose_budget, widest_row_block, worker_bytes
from tests.builders import write_moe
from tests.recipes import data_free_recipe

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "resident_bytes", lambda: 100 * MIB)


def test_the_formula() -> None:
    budget = choose_budget(3, None, 0, "cpu")
    assert (budget.workers, budget.tile_bytes) == (3, MIB)
    assert budget.peak_bytes == (100 + 3 * (2 * 8 + 10)) * MIB


def test_buffers_are_those_of_the_writer() -> None:
    assert memory.READ_BYTES == canonical.READ_BYTES


def test_tiles_shrink_before_workers_go() -> None:
    budget = choose_budget(2, 160 * MIB, 0, "cpu")
    assert (budget.workers, budget.tile_bytes) == (2, 1 * MIB)
    assert budget.peak_bytes == (100 + 2 * (16 + 10)) * MIB
    budget = choose_budget(4, 140 * MIB, 0, "cpu")
    assert (budget.workers, budget.tile_bytes) == (2, SMALLEST_TILE)
    assert budget.peak_bytes <= 140 * MIB


@pytest.mark.parametrize("limit", range(119, 400, 7))
def test_never_above_the_limit(limit: int) -> None:
    assert choose_budget(8, limit * MIB, 0, "cpu").peak_bytes <= limit * MIB


def test_too_little_says_the_least() -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        choose_budget(8, 110 * MIB, 0, "cpu")
    assert caught.value.exit_code == 4
    assert "118.5 MiB" in str(caught.value)
    assert choose_budget(8, 100 * MIB + worker_bytes(SMALLEST_TILE, "cpu"), 0, "cpu").workers == 1


def test_a_block_of_rows_is_never_cut() -> None:
    assert choose_budget(1, None, 6 * MIB, "cpu").tile_bytes == 6 * MIB
    assert choose_budget(1, 10_000 * MIB, 6 * MIB, "cpu").tile_bytes == 6 * MIB
    with pytest.raises(EnvironmentProblem):
        choose_budget(1, 150 * MIB, 6 * MIB, "cpu")


def test_torch_needs_more() -> None:
    assert worker_bytes(DEFAULT_TILE, "torch") > worker_bytes(DEFAULT_TILE, "cpu")


@pytest.mark.parametrize("workers", [0, -1])
def test_workers_must_be_positive(workers: int) -> None:
    with pytest.raises(UsageError):
        choose_budget(workers, None, 0, "cpu")


def test_default_workers() -> None:
    assert choose_budget(None, None, 0, "cpu").workers == min(8, len(os.sched_getaffinity(0)))


def test_widest_block(tmp_path: Path) -> None:
    with open_checkpoint(write_moe(tmp_path / "fp8", "glm_moe_dsa")) as checkpoint:
        plan = build_plan(checkpoint, data_free_recipe())
        weights = {w.weight.name: w for w in checkpoint.weights().values()}
        jobs = [job for shard in plan.shards for job in shard.jobs]
        assert widest_row_block(jobs, weights) == 256  # one row of gate or up: hidden size, a byte each
    with open_checkpoint(write_moe(tmp_path / "bf16", "glm_moe_dsa", storage="bf16")) as checkpoint:
        plan = build_plan(checkpoint, data_free_recipe(make_fp8=True))
        weights = {w.weight.name: w for w in checkpoint.weights().values()}
        jobs = [job for shard in plan.shards for job in shard.jobs]
        assert widest_row_block(jobs, weights) == 128 * 2 * 256  # 128 rows of BF16


def test_resident_bytes_is_this_process() -> None:
    """In one of its own: what others leave behind here may be freed meanwhile."""
    code = (
        "from quantkit.plan.memory import resident_bytes\n"
        "before = resident_bytes()\n"
        "ballast = b'1' * (64 << 20)\n"
        "print(resident_bytes() - before)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 60 * MIB < int(run.stdout) < 80 * MIB
