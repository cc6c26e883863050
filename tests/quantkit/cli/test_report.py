"""``quantkit report``: one conversion, two, and what cannot be reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders import write_moe
from tests.quantkit.convert.cases import run as convert
from tests.quantkit.inspection.test_conversions import calibrated, edited

from .conftest import Run


@pytest.fixture(scope="module")
def rtn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return convert(write_moe(folder / "model", "qwen3_moe"), folder / "rtn").path


@pytest.fixture(scope="module")
def gptq(rtn: Path) -> Path:
    return edited(rtn, rtn.parent / "gptq", calibrated({"gate_proj": 0.25, "up_proj": 0.25, "down_proj": 0.75}))


def test_one(run: Run, rtn: Path) -> None:
    found = json.loads(run("report", rtn, "--json").out)
    assert found["artifact"] == str(rtn) and found["errors"]["decode"]["all"]["weights"] > 0
    shown = run("report", rtn)
    assert (shown.code, shown.err) == (0, "") and "tokens" not in shown.out
    assert f"{found['errors']['decode']['all']['rms']:.3%} in the mean" in shown.out


def test_calibrated(run: Run, gptq: Path) -> None:
    shown = run("report", gptq).out
    assert "tokens 300 at least, 300 in the middle; 0 starved" in shown
    assert "0 dampened more than asked" in shown and "output error to rtn" in shown
    row = next(line for line in shown.splitlines() if line.startswith("0 ")).split()
    assert row[-7:] == [str(len(json.loads(run("report", gptq, "--json").out)["calibration"]["0"]["tokens"])),
                        "300", "300", "0", "0.250", "1.500", "0.01"]  # fmt: skip


def test_two(run: Run, rtn: Path, gptq: Path) -> None:
    found = json.loads(run("report", rtn, gptq, "--json").out)
    assert found["total"]["ratio"] == 1 and found["total"]["output_b"] == 0.25
    shown = run("report", rtn, gptq)
    assert shown.code == 0 and "B / A" in shown.out and "only in" not in shown.out
    assert any(line.split()[0] == "all" and "1.000" in line for line in shown.out.splitlines() if line.strip())


def test_exit_codes(run: Run, rtn: Path, tmp_path: Path) -> None:
    other = convert("tiny-qwen3", tmp_path / "other").path
    for arguments, code, part in (
        ((rtn, other), 2, "made from other tensors"), ((tmp_path,), 3, "not an artifact"),
        ((rtn, tmp_path / "none"), 3, "no such directory"), ((), 2, "Missing argument"),
    ):  # fmt: skip
        failed = run("report", *arguments, "--json")
        assert failed.code == code and part in failed.err
        assert json.loads(failed.out)["exit_code"] == code
