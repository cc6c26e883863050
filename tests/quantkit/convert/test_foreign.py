"""Another engine's results in our artifact. The engine is a stand-in that rounds to nearest, so that every byte of
the decode view is known from another path: our own ``rtn``. llm-compressor itself: ``test_llmcompressor.py``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit_kernels as kernels
from quantkit.artifact import Artifact, verify_artifact
from quantkit.artifact.dequantize import dequantize
from quantkit.artifact.records import read_records
from quantkit.calibration.samples import CalibrationSet
from quantkit.checkpoint import open_checkpoint
from quantkit.convert import convert, llmcompressor
from quantkit.convert.llmcompressor import Rounded, Task
from quantkit.errors import ArtifactError, EnvironmentProblem, SourceError, UsageError
from quantkit.plan import build_plan
from quantkit.plan.memory import resident_bytes
from quantkit.recipe import default_recipe
from tests.builders import moe, write_checkpoint, write_moe
from tests.quantkit.convert.cases import core_digests

NAMES = {"w1": "gate", "w2": "down", "w3": "up"}
LABEL = "llmcompressor 0.14.0.1"


class RoundsToNearest:
    """In place of ``llmcompressor``: reads the copy it is given, and rounds the experts of the source.

    Attributes:
        tasks: what it was asked to do.
        sign: of its scales.
        fallback: keys that it says it only rounded.
    """

    def __init__(self, source: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source, self.tasks, self.sign = source, [], 1
        self.fallback: set[Any] = set()
        monkeypatch.setattr(llmcompressor, "quantize", self)
        monkeypatch.setattr(llmcompressor, "engine_label", lambda method: LABEL)

    def __call__(self, task: Task) -> Iterator[Rounded]:
        self.tasks.append(task)
        with open_checkpoint(task.model) as copy:  # it is a whole BF16 checkpoint
            assert {w.weight.dtype for w in copy.weights().values()} <= {"BF16", "F32"}
        with open_checkpoint(self.source) as checkpoint:
            for module, weight in checkpoint.weights().items():
                found = re.fullmatch(r".*layers\.(\d+)\..*experts\.(\d+)\.(\w+?)(?:_proj)?", module)
                key = found and (int(found[1]), int(found[2]), NAMES.get(found[3], found[3]))
                if key not in task.targets:
                    continue
                ours = kernels.float_to_int4(dequantize(checkpoint, weight), task.group_size, "rtn")
                values = kernels.int4_to_float32(ours.packed, ours.scale, weight.shape[1])
                scale = ours.scale if self.sign > 0 else ours.scale | 0x8000
                if self.sign < 0:  # 7 and -8 change places, and -8 * -s is beyond: keep it out
                    step = kernels.bf16_to_float32(ours.scale).repeat(task.group_size, 1)
                    values = np.maximum(values, -7 * step)
                yield Rounded(key, values, scale, key in self.fallback)


def run(source: str | Path, out: Path, **options: Any) -> Artifact:
    run_options = {k: options.pop(k) for k in ("on_progress", "max_memory", "jobs") if k in options}
    given = options.pop("given", samples())
    chosen = {"engine": "llmcompressor", "method": "gptq", "layers": "1-2", **options}
    with open_checkpoint(source) as checkpoint:
        plan = build_plan(checkpoint, default_recipe().with_options(**chosen))
        return convert(plan, checkpoint, out, calibration=given, **run_options)


def samples(count: int = 4, length: int = 16) -> CalibrationSet:
    return CalibrationSet(np.random.default_rng(0).integers(0, 64, (count, length)), f"{7:064x}", {})


def rtn(source: str | Path, out: Path, **options: Any) -> dict[str, str]:
    run(source, out, **{"engine": None, "method": "rtn", **options})
    return core_digests(out)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> RoundsToNearest:
    return RoundsToNearest("tiny-glm", monkeypatch)


WEIGHTS = re.compile(r".*\.safetensors(\.index\.json)?|.*/config\.json|prefill/(?!quantkit_view).*")


def test_the_same_artifact_but_for_the_numbers(engine: RoundsToNearest, tmp_path: Path) -> None:
    run("tiny-glm", tmp_path / "out")
    assert verify_artifact(tmp_path / "out").ok
    ours, theirs = rtn("tiny-glm", tmp_path / "rtn"), core_digests(tmp_path / "out")
    assert ours.keys() == theirs.keys() and not (tmp_path / "out" / "calibration").exists()
    same = {name for name in ours if WEIGHTS.fullmatch(name)}
    assert len(same) > 20 and {name for name in ours if ours[name] == theirs[name]} >= same
    errors = {r.name: r.decode.relative_error for r in read_records(tmp_path / "rtn")}
    assert errors == {r.name: r.decode.relative_error for r in read_records(tmp_path / "out")}


def test_what_manifest_and_records_say(engine: RoundsToNearest, tmp_path: Path) -> None:
    engine.fallback = {(2, 5, "down")}
    artifact = run("tiny-glm", tmp_path / "out", percdamp=0.05, propagate="original")
    assert artifact.manifest.engine == LABEL and artifact.manifest.calibration_sha256 == samples().digest
    assert artifact.manifest.pair_id == artifact.manifest.expected_pair_id()
    (task,) = engine.tasks
    assert (task.method, task.group_size, task.percdamp, task.propagate_quantized) == ("gptq", 32, 0.05, False)
    assert np.array_equal(task.token_ids, samples().token_ids) and not task.model.exists()
    assert task.targets == {(n, e, p) for n in (1, 2) for e in range(16) for p in ("gate", "up", "down")}
    facts = {r.name: r.decode.calibration for r in read_records(tmp_path / "out") if r.decode.calibration}
    assert len(facts) == 2 * 16 * 3 and {f["tokens"] for f in facts.values()} == {64}
    fallback = "model.layers.2.mlp.experts.5.down_proj.weight"
    assert [name for name, f in facts.items() if f["form"] == "none"] == [fallback]
    report = json.loads((tmp_path / "out" / "attachments" / "report.json").read_text())
    assert (
        report["engine"] == LABEL and report["exceptions"]["rounded"] == [fallback] and report["route_all"] is True
    )


def test_negative_scales(engine: RoundsToNearest, tmp_path: Path) -> None:
    engine.sign = -1
    artifact = run("tiny-glm", tmp_path / "out", method="autoround")
    assert verify_artifact(tmp_path / "out").ok
    module = "model.layers.1.mlp.experts.0.up_proj"
    exact, found = artifact.prefill[module].dequantize(), artifact.decode[module].dequantize()
    assert 0.05 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.12


@pytest.mark.parametrize("family", ["minimax_m2", "deepseek_v3"])
def test_names_of_families(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """w1, w2 and w3 are gate, down and up; crossed, they would not fit the shapes or the error."""
    source = write_moe(tmp_path / "source", family)
    RoundsToNearest(source, monkeypatch)
    run(source, tmp_path / "out", layers=None)
    assert verify_artifact(tmp_path / "out").ok
    ours, theirs = rtn(source, tmp_path / "rtn", layers=None), core_digests(tmp_path / "out")
    assert {n for n in ours if n.endswith(".safetensors")} <= {n for n in ours if ours[n] == theirs[n]}


def crash_at(count: int) -> Any:
    seen = 0

    def callback(event: Any) -> None:
        nonlocal seen
        seen += event.stage == "calibration"
        if seen == count:
            raise RuntimeError("crash")

    return callback


def test_resumes(engine: RoundsToNearest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("tiny-glm", tmp_path / "whole")
    with pytest.raises(RuntimeError, match="crash"):
        run("tiny-glm", tmp_path / "out", on_progress=crash_at(60))
    with monkeypatch.context() as patch:
        patch.setattr(llmcompressor, "engine_label", lambda method: "llmcompressor 0.15")
        with pytest.raises(ArtifactError, match="started with another engine"):
            run("tiny-glm", tmp_path / "out")
    run("tiny-glm", tmp_path / "out")
    assert core_digests(tmp_path / "out") == core_digests(tmp_path / "whole")
    assert len(engine.tasks) == 3 and run("tiny-glm", tmp_path / "out").was_complete
    monkeypatch.setattr(llmcompressor, "engine_label", lambda method: "llmcompressor 0.15")
    with pytest.raises(UsageError, match=r"made by llmcompressor 0\.14\.0\.1, not llmcompressor 0\.15"):
        run("tiny-glm", tmp_path / "out")


@pytest.mark.parametrize(("installed", "says"), [({}, "llmcompressor is not installed"),
    ({"llmcompressor": "0.14.0"}, "auto-round is not installed"),
    ({"llmcompressor": "0.9.1", "auto-round": "1"}, "llmcompressor 0.9.1 is too old")])  # fmt: skip
def test_not_installed(installed: dict[str, str], says: str, tmp_path: Path, monkeypatch: Any) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(EnvironmentProblem, match=rf"{re.escape(says)}.*pip install 'quantkit\[llmcompressor\]'"):
        run("tiny-glm", tmp_path / "out", method="autoround")
    assert not any(tmp_path.iterdir())


def test_too_little_memory(engine: RoundsToNearest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = resident_bytes() + (38 << 20)
    with pytest.raises(EnvironmentProblem, match=r"--max-memory: .*whole model: .* are needed, .* of it are left"):
        run("tiny-glm", tmp_path / "out", given=samples(64, 512), max_memory=allowed, jobs=1)
    monkeypatch.setattr("quantkit.convert.foreign.available_bytes", lambda: 20 << 20)
    with pytest.raises(EnvironmentProblem, match=r"are needed, .*20\.0 MiB.* are available.*--engine quantkit"):
        run("tiny-glm", tmp_path / "out")
    assert not engine.tasks and not any(tmp_path.iterdir())


def test_damaged_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    for storage, damage in (("fp8-block", b"\x7f"), ("bf16", b"\xc0\x7f")):
        tensors, config = moe("qwen3_moe", storage=storage)
        data = tensors[name].data
        tensors[name] = type(tensors[name])(tensors[name].dtype, tensors[name].shape, damage + data[len(damage) :])
        source = write_checkpoint(tmp_path / storage, tensors, config)
        engine = RoundsToNearest(source, monkeypatch)
        with pytest.raises(SourceError, match=rf"{re.escape(name)}.*NaN"):
            run(source, tmp_path / f"{storage}-out", layers=None, make_fp8=storage == "bf16")
        assert not engine.tasks
