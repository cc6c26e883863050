"""Conversions that calibrate multi-token-prediction layers: families, workers, resumption, what changes where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.artifact import verify_artifact
from quantkit.calibration.stream import Stream
from quantkit.errors import UnsupportedError
from tests.builders import moe, write_checkpoint
from tests.quantkit.calibration.test_mtp import two_predictions
from tests.quantkit.convert.cases import core_digests
from tests.quantkit.convert.test_calibrated import calibrated, crash, run, samples_of, stop_in

OPTIONS: dict[str, Any] = {"mtp": "quantize", "linears": "all"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_predictions(tmp_path_factory.mktemp("source") / "checkpoint")


@pytest.fixture(scope="module")
def whole(source: Path) -> Path:
    """Two layers and two prediction layers, undisturbed, by one worker."""
    out = source.parent / "artifact"
    run(source, out, given=samples_of(4, 40), jobs=1, **OPTIONS)
    return out


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32", "glm4_moe"])
def test_families(family: str, tmp_path: Path) -> None:
    tensors, config = moe(family)
    config |= {"use_qk_norm": True, "attention_bias": True} if family == "glm4_moe" else {}
    source = write_checkpoint(tmp_path / "source", tensors, config)
    run(source, tmp_path / "out", given=samples_of(2, 40), **OPTIONS)
    assert verify_artifact(tmp_path / "out").ok
    records = [r for r in calibrated(tmp_path / "out") if r.layer == 2]
    assert len(records) == 4 * 3 + 3 + 4  # experts, shared experts, attention
    for record in records:
        facts = record.decode.calibration
        assert facts is not None and record.decode.method == "gptq" and facts["error_to_rtn"] <= 1
        assert facts["tokens"] <= 2 * 39 and (record.expert is not None or facts["tokens"] == 2 * 39)


def test_each_further_layer_sees_one_token_less(whole: Path) -> None:
    assert verify_artifact(whole).ok
    shared = [r for r in calibrated(whole) if "shared_experts.up_proj" in r.name]
    assert {r.layer: r.decode.calibration and r.decode.calibration["tokens"] for r in shared} == {
        1: 4 * 40, 2: 4 * 39, 3: 4 * 38
    }  # fmt: skip


def test_workers_change_no_byte(source: Path, whole: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", given=samples_of(4, 40), jobs=3, **OPTIONS)
    assert core_digests(tmp_path / "out") == core_digests(whole)


def test_mapped_arrays_change_no_byte(
    source: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.calibration.memory.DEFAULT_ARRAY_BYTES", 1000)
    run(source, tmp_path / "out", given=samples_of(4, 40), **OPTIONS)
    assert core_digests(tmp_path / "out") == core_digests(whole)


@pytest.mark.parametrize(("layer", "weights"), [(2, 1), (2, 10), (3, 1), (3, 12)])
def test_resumes_with_the_same_bytes(
    layer: int, weights: int, source: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the state before the first prediction layer, and from the shorter one before the second."""
    options = {"given": samples_of(4, 40), **OPTIONS}
    with pytest.raises(RuntimeError, match="crash"):
        run(source, tmp_path / "out", on_progress=stop_in(layer, weights, crash), **options)
    passed: list[int] = []
    real = Stream.forward

    def forward(self: Stream, work: Any) -> None:
        passed.append(self.position)
        real(self, work)

    monkeypatch.setattr(Stream, "forward", forward)
    run(source, tmp_path / "out", **options)
    assert passed == list(range(layer, 4))
    assert core_digests(tmp_path / "out") == core_digests(whole)


def test_the_models_own_layers_do_not_notice(source: Path, whole: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", given=samples_of(4, 40), linears="all")
    without = {r.name: r.decode.outputs for r in calibrated(tmp_path / "out")}
    found = {r.name: r.decode.outputs for r in calibrated(whole)}
    assert without.keys() < found.keys() and all(found[name] == outputs for name, outputs in without.items())


def test_a_layer_that_cannot_be_run_names_the_option(tmp_path: Path) -> None:
    tensors, config = moe("deepseek_v3")
    del tensors["model.layers.2.hnorm.weight"]
    source = write_checkpoint(tmp_path / "source", tensors, config)
    with pytest.raises(UnsupportedError, match=r"layer without hnorm.*decode\.mtp"):
        run(source, tmp_path / "out", given=samples_of(2, 40), mtp="quantize")
