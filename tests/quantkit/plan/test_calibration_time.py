"""The time of calibration: counted by hand on a small model, sane at published size, and shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.checkpoint import open_checkpoint
from quantkit.cli import show_plan
from quantkit.plan import build_plan
from quantkit.plan.calibration_time import (
    SEARCHES_PER_SCORE,
    SEARCHES_PER_WEIGHT,
    START_SECONDS,
    calibration_seconds,
    gptq_flops,
)
from quantkit.plan.estimate import estimate_time
from quantkit.plan.probe import Rates, measure
from quantkit.plan.summary import summarise
from quantkit.recipe import default_recipe, load_recipe
from tests.builders import write_moe
from tests.facts import FactsCheckpoint

RATES = Rates(1e8, 1e9, 1e9, "cpu", 1e11)


def test_by_hand(tmp_path: Path) -> None:
    """Two layers of four experts of 128 x 256, two for each of 640 tokens; four heads of 32, two key heads."""
    recipe = default_recipe().with_options(samples=10, length=64)
    with open_checkpoint(write_moe(tmp_path / "m", "qwen3_moe")) as checkpoint:
        plan = build_plan(checkpoint, recipe)
        found = calibration_seconds(plan, checkpoint, Rates(1e6, 1, 1, "cpu", 1e9), 2)
        assert found is not None
        tokens, seen = 640, 320
        gate_up = 2 * seen * 256**2 + 256**3 / 3 + 256 * 256**2
        down = 2 * seen * 128**2 + 128**3 / 3 + 256 * 128**2
        attention = 2 * (128 * 256) + 2 * (64 * 256)
        passed = 4 * (tokens * (attention + 4 * 256) + 4 * seen * 3 * 128 * 256)  # with the router; twice two
        flops = 2 * (4 * (gate_up + down) + passed)
        searches = SEARCHES_PER_WEIGHT * 2 * 4 * 3 * 128 * 256 + SEARCHES_PER_SCORE * 2 * 10 * 64**2 * 4 * 2
        assert found == pytest.approx(START_SECONDS + (flops / 1e9 + searches / 1e6) / 2)
        all_routed = build_plan(checkpoint, recipe.with_options(route_all=True))
        assert calibration_seconds(all_routed, checkpoint, RATES, 2) > calibration_seconds(
            plan, checkpoint, RATES, 2
        )  # type: ignore[operator]
        first = build_plan(checkpoint, recipe.with_options(layers="0"))  # the pass ends there
        whole, half = (calibration_seconds(p, checkpoint, RATES, 2) for p in (plan, first))
        assert whole is not None and half is not None
        assert half - START_SECONDS == pytest.approx((whole - START_SECONDS) / 2)


def test_few_tokens_take_the_cheaper_form() -> None:
    assert gptq_flops(4096, 6144, 512) == pytest.approx(58e9, rel=0.01)  # the table of calibration/factor.py
    assert gptq_flops(4096, 6144, 1537) == pytest.approx(2 * 1537 * 6144**2 + 77.3e9 + 155e9, rel=0.01)


def test_glm_52_takes_hours_and_not_minutes() -> None:
    """19,200 experts with 1,024 tokens each at two to three seconds on two cores, and the passes."""
    checkpoint = FactsCheckpoint("glm-5.2-fp8")
    plan = build_plan(checkpoint, load_recipe("glm-5.2"))  # type: ignore[arg-type]
    found = calibration_seconds(plan, checkpoint, Rates(1.3e8, 1e9, 1e9, "cpu", 9e10), 2)  # type: ignore[arg-type]
    assert found is not None and 8 < found / 3600 < 32


def test_it_is_part_of_the_estimate_and_shown(tmp_path: Path) -> None:
    with open_checkpoint("tiny-glm") as checkpoint:
        plan, free = (
            build_plan(checkpoint, load_recipe("tiny-glm").with_options(method=m)) for m in ("gptq", "mse")
        )
        found, without = (estimate_time(p, checkpoint, RATES, 2) for p in (plan, free))
        assert without.calibration_seconds is None and found.calibration_seconds is not None
        assert found.calibration_seconds > START_SECONDS and found.excludes == without.excludes == ()
        assert found.seconds == pytest.approx(
            found.calibration_seconds + max(found.cpu_seconds / 2, found.io_seconds or 0)
        )
        shown = [
            block for block in show_plan.plan(summarise(plan, checkpoint, rates=RATES)) if isinstance(block, str)
        ]
        assert any("of it calibration on the CPU (within a factor of two)" in line for line in shown)
        assert any(line.startswith("memory") and "calibration not counted" in line for line in shown)
        unknown = estimate_time(plan, checkpoint, Rates(1e8, 1e9, 1e9, "cpu"), 2)
        assert unknown.calibration_seconds is None and unknown.excludes == ("calibration",)


def test_products_are_measured_where_they_matter() -> None:
    with open_checkpoint("tiny-glm") as checkpoint:
        plan, free = (
            build_plan(checkpoint, load_recipe("tiny-glm").with_options(method=m)) for m in ("gptq", "mse")
        )
        rate = measure(plan, checkpoint, seconds=0.02).matmul_flops_per_s
        assert rate is not None and 1e8 < rate < 1e13
        assert measure(free, checkpoint, seconds=0.02).matmul_flops_per_s is None
