"""Calibration on a device: nothing is forgotten on the host (on a pretended one), and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.artifact import Artifact, verify_artifact
from quantkit.calibration.device import open_device
from quantkit.calibration.samples import CalibrationSet
from quantkit.checkpoint import open_checkpoint
from quantkit.cli.main import main
from quantkit.convert import convert
from quantkit.errors import ArtifactError, EnvironmentProblem, UsageError
from quantkit.plan import build_plan
from quantkit.recipe import default_recipe
from tests.builders import write_moe
from tests.quantkit.calibration.pretend_device import DEVICE, MixedDevices, pretend_device
from tests.quantkit.convert.cases import core_digests
from tests.quantkit.convert.test_calibrated import crash, samples_of, stop_in

LABEL = "a pretended device"
EVERYTHING: dict[str, Any] = {"method": "gptq+awq", "linears": "all", "mtp": "quantize"}
SMALL = samples_of(4, 40)
FEW = samples_of(1, 3)  # some of the four experts without any token


class InThisThread:
    """Workers whose tasks run where they are asked for, since the pretence holds for one thread."""

    def __init__(self, count: int) -> None:
        self.count = count

    def ordered(self, work: Callable[[Any], Any], items: Iterable[Any], ahead: int = 1) -> Iterator[Any]:
        for item in items:
            with torch.no_grad():
                result = work(item)
            yield result

    def close(self) -> None:
        pass


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("quantkit.convert.run.open_device", lambda name: DEVICE)
    monkeypatch.setattr("quantkit.convert.run.label_of", lambda device: LABEL)
    monkeypatch.setattr("quantkit.convert.calibrated.workers_on", lambda device, workers, shape: 1)
    monkeypatch.setattr("quantkit.convert.calibrated.Workers", InThisThread)
    with pretend_device():
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention with an indexer, a dense and a sparse layer, and one of multi-token prediction."""
    return write_moe(tmp_path_factory.mktemp("source") / "m", "glm_moe_dsa")


def run(
    source: Path | str, out: Path, device: str, options: dict[str, Any] = EVERYTHING, given: Any = SMALL,
    on_progress: Any = None,
) -> Artifact:  # fmt: skip
    with open_checkpoint(source) as checkpoint:
        plan = build_plan(checkpoint, default_recipe().with_options(**options))
        return convert(plan, checkpoint, out, jobs=1, device=device, calibration=given, on_progress=on_progress)


@pytest.mark.parametrize("given", [SMALL, FEW], ids=["some tokens", "few tokens"])
def test_all_of_calibration_runs_on_the_device(
    given: CalibrationSet, source: Path, tmp_path: Path, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(source, tmp_path / "there", "cuda", given=given)
    monkeypatch.undo()
    run(source, tmp_path / "here", "cpu", given=given)
    assert core_digests(tmp_path / "there") == core_digests(tmp_path / "here")
    assert verify_artifact(tmp_path / "there").ok
    for name, device in (("there", LABEL), ("here", "cpu")):
        statement = json.loads((tmp_path / name / "attachments" / "provenance.intoto.json").read_text())
        assert statement["predicate"]["runDetails"]["builder"]["version"]["device"] == device


def test_the_pretence_notices_what_is_forgotten() -> None:
    with pretend_device() as device:
        there = torch.ones(2, 3, device=device)
        assert torch.equal((there @ there.T).cpu(), torch.full((2, 2), 3.0))
        with pytest.raises(MixedDevices, match="aten::mm"):
            there @ torch.ones(3, 2)
        with pytest.raises(MixedDevices):
            there.numpy()


def test_a_run_is_continued_on_its_device(
    source: Path, tmp_path: Path, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="crash"):
        run(source, tmp_path / "out", "cuda", on_progress=stop_in(1, 5, crash))
    monkeypatch.undo()
    with pytest.raises(ArtifactError, match="another device"):
        run(source, tmp_path / "out", "cpu")


def test_without_cuda_there_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["convert", "tiny-glm", "--device", "cuda", "-q", "-o", str(tmp_path / "out")]) == 4
    said = capsys.readouterr().err
    assert said.count("error:") == 1 and "--device cuda: torch" in said and "accepted: cpu" in said
    assert list(tmp_path.iterdir()) == []


def test_a_device_without_calibration_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing is calibrated"):
        run(source, tmp_path / "out", "cuda", {"method": "rtn"})


def test_which_device_a_process_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [open_device(name) for name in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda:0", "cuda:1"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [open_device(name) for name in ("cuda", "cuda:0")] == ["cuda:1", "cuda:0"]
    monkeypatch.setenv("LOCAL_RANK", "2")
    for name in ("cuda", "cuda:2"):
        with pytest.raises(EnvironmentProblem, match="cuda:0 to cuda:1"):
            open_device(name)
    for name in ("gpu", "cuda:", "cuda:x"):
        with pytest.raises(UsageError, match="cuda:N"):
            open_device(name)
