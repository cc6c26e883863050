"""Disk and time: the arithmetic by hand, the probe on the real kernels, and what each leaves out."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.plan import Plan, build_plan, estimate
from quantkit.plan.estimate import estimate_disk, estimate_time
from quantkit.plan.fate import Op
from quantkit.plan.probe import Rates, measure
from tests.builders import write_moe
from tests.recipes import data_free_recipe


@pytest.fixture
def tiny() -> Any:
    with open_checkpoint("tiny-glm") as checkpoint:
        yield checkpoint


def planned(checkpoint: Checkpoint, **options: Any) -> Plan:
    return build_plan(checkpoint, data_free_recipe("tiny-glm", **options))


def as_hub(checkpoint: Checkpoint, *, here: bool) -> Any:
    """The same checkpoint as if it came from a hub, with or without its files on disk."""
    paths = checkpoint.local_path if here else (lambda name: None)
    return SimpleNamespace(kind="hub", files=checkpoint.files, tensors=checkpoint.tensors, local_path=paths)


def test_a_local_source_is_counted_as_a_copy(tiny: Checkpoint, tmp_path: Path) -> None:
    plan = planned(tiny)
    found = estimate_disk(plan, tiny, tmp_path / "not" / "there")
    assert found.target == str(tmp_path)
    assert not (tmp_path / "not").exists()
    assert (found.placement, found.placement_bytes) == ("copy", sum(f.nbytes for f in tiny.files.values()))
    assert found.needed_bytes == plan.disk.decode + plan.disk.other + found.placement_bytes
    stats = os.statvfs(tmp_path)
    assert found.free_bytes == pytest.approx(stats.f_bavail * stats.f_frsize, rel=0.05)
    assert found.download_bytes == 0
    assert found.problem is None


def test_links_and_references_cost_nothing(tiny: Checkpoint, tmp_path: Path) -> None:
    for place, said in (("link", "hard link"), ("reference", "reference")):
        found = estimate_disk(planned(tiny, place=place), tiny, _beside(tiny) if place == "link" else tmp_path)
        assert (found.placement, found.placement_bytes) == (said, 0)


def _beside(checkpoint: Checkpoint) -> Path:
    path = checkpoint.local_path(next(iter(checkpoint.files)))
    assert path is not None
    return path.parent


def test_auto_links_out_of_the_hub_cache(tiny: Checkpoint) -> None:
    found = estimate_disk(planned(tiny), as_hub(tiny, here=True), _beside(tiny))
    assert (found.placement, found.placement_bytes, found.download_bytes) == ("hard link", 0, 0)


def test_files_on_another_file_system_are_copied(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.stat
    target = _beside(tiny).parent

    def elsewhere(self: Path, **options: Any) -> Any:
        found = real(self, **options)
        return SimpleNamespace(st_dev=-1, st_mode=found.st_mode) if self == target else found

    monkeypatch.setattr(Path, "stat", elsewhere)
    found = estimate_disk(planned(tiny), as_hub(tiny, here=True), target)
    assert (found.placement, found.placement_bytes) == ("copy", sum(f.nbytes for f in tiny.files.values()))


def test_a_download_needs_room_in_the_cache(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    plan, source = planned(tiny), sum(f.nbytes for f in tiny.files.values())
    found = estimate_disk(plan, as_hub(tiny, here=False), tmp_path)
    assert (found.placement, found.placement_bytes, found.download_bytes) == ("hard link", 0, source)
    assert found.needed_bytes == plan.disk.decode + plan.disk.other + source
    # the cache elsewhere: its room is not the target's, but files can't be linked then
    monkeypatch.setattr(estimate, "_cache_device", lambda checkpoint: -1)
    found = estimate_disk(plan, as_hub(tiny, here=False), tmp_path)
    assert (found.placement, found.placement_bytes, found.download_bytes) == ("copy", source, source)
    assert found.needed_bytes == plan.disk.decode + plan.disk.other + source


def test_views_that_are_both_derived_place_nothing(tmp_path: Path) -> None:
    with open_checkpoint(write_moe(tmp_path / "bf16", "glm_moe_dsa", storage="bf16")) as checkpoint:
        plan = build_plan(checkpoint, data_free_recipe(make_fp8=True))
        found = estimate_disk(plan, checkpoint, tmp_path)
        assert (found.placement, found.placement_bytes) == ("none", 0)
        assert found.needed_bytes == plan.disk.decode + plan.disk.prefill + plan.disk.other


def test_too_little_space_is_said(tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate.os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=4096))
    found = estimate_disk(planned(tiny), tiny, tmp_path)
    assert found.free_bytes == 40_960
    assert found.problem is not None
    assert "41.0 kB (40.0 KiB) free" in found.problem
    assert found.to_json()["problem"] == found.problem


def test_time_by_hand(tiny: Checkpoint) -> None:
    plan = planned(tiny)
    source, written = sum(f.nbytes for f in tiny.files.values()), plan.sizes.decode.tensor_bytes
    # 5 MoE layers of 16 experts, the MTP layer's stay: three matrices of 128 x 256
    weights = 5 * 16 * 3 * 128 * 256
    assert weights == sum(
        job.outputs[0].shape[0] * job.outputs[0].shape[1] * 8
        for job in plan.jobs("decode")
        if job.op is Op.TO_INT4
    )
    rates = Rates(weights_per_s=1e6, hash_bytes_per_s=1e8, read_bytes_per_s=1e7, backend="cpu")
    cpu = weights / 1e6 + 2 * (source + written) / 1e8
    one, four = estimate_time(plan, tiny, rates, 1), estimate_time(plan, tiny, rates, 4)
    assert one.cpu_seconds == pytest.approx(cpu)
    assert one.io_seconds == pytest.approx((source + written) / 1e7)
    assert one.seconds == pytest.approx(cpu)
    assert four.seconds == pytest.approx(max(cpu / 4, (source + written) / 1e7))
    assert one.excludes == ()
    assert one.to_json()["is_estimate"] is True
    copied = estimate_time(planned(tiny, place="copy"), tiny, rates, 1)
    assert copied.io_seconds == pytest.approx((2 * source + written) / 1e7)


def test_time_says_what_it_leaves_out(tiny: Checkpoint) -> None:
    found = estimate_time(planned(tiny), as_hub(tiny, here=False), Rates(1e6, 1e8, None, "cpu"), 2)
    assert found.excludes == ("download", "reading and writing")
    assert found.io_seconds is None
    assert found.seconds == found.cpu_seconds / 2


def test_native_int4_counts_weights_and_not_words(tmp_path: Path) -> None:
    with open_checkpoint(write_moe(tmp_path / "k", "kimi_k25")) as checkpoint:
        plan = build_plan(checkpoint, data_free_recipe(make_fp8=True))
        expected = sum(
            job.outputs[0].shape[0] * job.outputs[0].shape[1]
            for job in plan.jobs("prefill")
            if job.op is Op.TO_FP8
        )
        found = estimate_time(plan, checkpoint, Rates(1.0, 1e18, None, "cpu"), 1)
        assert found.cpu_seconds == pytest.approx(expected)


def test_the_probe_measures(tiny: Checkpoint) -> None:
    rates = measure(planned(tiny, method="rtn"), tiny, seconds=0.02)
    assert rates.weights_per_s > 1e6
    assert rates.hash_bytes_per_s > 1e7
    assert rates.read_bytes_per_s is not None
    assert rates.read_bytes_per_s > 1e5
    assert rates.backend in ("cpu", "torch")


def test_the_probe_reads_nothing_that_is_not_on_disk(tiny: Checkpoint) -> None:
    assert measure(planned(tiny), as_hub(tiny, here=False), seconds=0.01).read_bytes_per_s is None
