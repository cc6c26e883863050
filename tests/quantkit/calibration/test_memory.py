"""Tasks and arrays that fit into a memory limit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from quantkit.calibration.memory import DEFAULT_ARRAY_BYTES, Shape, choose_workers, largest_layer, largest_stage
from quantkit.errors import EnvironmentProblem

GIB = 1 << 30
GLM = Shape(hidden=6144, inner=2048, heads=64, layer_weights=165_000_000, batch=8, length=256)
RESIDENT = 700 << 20


def test_one_expert_of_glm_5_2_fits_into_three_gib() -> None:
    assert choose_workers(8, 3 * GIB, RESIDENT, GLM).workers == 1


def test_more_memory_means_more_experts_at_once() -> None:
    counts = [choose_workers(8, gib * GIB, RESIDENT, GLM).workers for gib in (3, 6, 12, 64)]
    assert counts == sorted(counts) and counts[0] < counts[1] < counts[2] and counts[-1] == 8


def test_everything_stays_below_the_limit() -> None:
    for gib in (3, 4, 5, 8, 16, 32):
        found = choose_workers(64, gib * GIB, RESIDENT, GLM)
        used = RESIDENT + 4 * GLM.layer_weights + found.workers * GLM.task_bytes + found.array_bytes
        assert used <= gib * GIB and found.workers >= 1


def test_without_limit_the_workers_are_those_asked_for() -> None:
    found = choose_workers(5, None, 0, GLM)
    assert (found.workers, found.array_bytes) == (5, DEFAULT_ARRAY_BYTES)


def test_not_enough_says_how_much_is() -> None:
    with pytest.raises(EnvironmentProblem, match=r"2\.\d\d GB .* are needed"):
        choose_workers(1, GIB, RESIDENT, GLM)


def test_long_samples_cost_attention() -> None:
    assert replace(GLM, batch=1, length=8192).task_bytes > 4 * GLM.task_bytes


def test_outputs_of_experts_count() -> None:
    more = replace(GLM, routed=10_000)
    assert more.task_bytes - GLM.task_bytes == 4 * 10_000 * GLM.hidden
    assert choose_workers(8, 6 * GIB, RESIDENT, more).workers <= choose_workers(8, 6 * GIB, RESIDENT, GLM).workers


def test_large_blocks_leave_the_process_when_they_are_freed() -> None:
    """Between blocks that stay; by default glibc would keep them from the second time on."""
    code = (
        "from quantkit.calibration.memory import free_at_once\n"
        "from quantkit.plan.memory import resident_bytes\n"
        "import sys\n"
        "if sys.argv[1] == 'limit': free_at_once()\n"
        "import numpy as np\n"
        "np.ones(8 << 20, np.uint8)\n"
        "before = resident_bytes()\n"
        "blocks = [np.ones((6 << 20) + i % 2, np.uint8) for i in range(20)]\n"
        "del blocks[:19]\n"
        "print(resident_bytes() - before)\n"
    )
    kept = [
        int(subprocess.run([sys.executable, "-c", code, way], capture_output=True, text=True, check=True).stdout)
        for way in ("limit", "none")
    ]
    assert kept[0] < 10 << 20 < 100 << 20 < kept[1]


def test_largest_layer() -> None:
    assert largest_layer([(0, 5), (1, 3), (1, 4), (None, 100)]) == 7
    assert largest_layer([]) == 0


def test_wide_linears_need_their_hessian_and_its_factor() -> None:
    """o_proj of GLM-5.2: 16,384 inputs, so a GiB for the Hessian alone, six of them while it is factorised."""
    wide = replace(GLM, columns=16384, stage=16384 * 6144)
    with pytest.raises(EnvironmentProblem, match=r"\d\.\d\d GB .* are needed"):
        choose_workers(1, 6 * GIB, RESIDENT, wide)
    found = choose_workers(8, 12 * GIB, RESIDENT, wide)
    used = RESIDENT + 4 * wide.layer_weights + wide.working_bytes(found.workers) + found.array_bytes
    assert 1 < found.workers <= 8 and used <= 12 * GIB
    assert choose_workers(8, 64 * GIB, RESIDENT, wide).workers == 8


def test_largest_stage() -> None:
    linears = [("a.gate", (4, 8)), ("a.up", (4, 8)), ("a.down", (8, 4)), ("b.o", (2, 16)), ("b.q", (3, 8))]
    assert largest_stage(linears) == (16, 64) and largest_stage([]) == (0, 0)
