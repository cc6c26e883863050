"""The script that a machine with a GPU runs: here in the interpreter, and what it says without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools import gpu_check


def test_it_runs_in_the_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_to = tmp_path / "deep" / "report.json"
    assert gpu_check.main(["--interpret", "--json", str(report_to)]) == 0
    report = json.loads(report_to.read_text(encoding="utf-8"))
    assert report["ok"] and report["is_complete"] and report["device"] == "interpreter"
    assert len(report["checks"]) > 50 and all(check["ok"] for check in report["checks"])
    names = " ".join(row["name"] for row in report["rows"])
    wanted = "int4_linear fp8_linear moe_int4 moe_fp8 gqa_decode gqa_prefill mla_decode mla_prefill index_scores"
    for operation in f"{wanted} index_topk fp8_to_int4 check_page_tags".split():
        assert operation in names
    assert "0 failed" in capsys.readouterr().out


def test_a_wrong_kernel_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools import gpu_correctness
    from tools.gpu_correctness import indexer

    monkeypatch.setattr(indexer.index, "index_topk", lambda scores, lengths, k: 1 / 0)
    monkeypatch.setattr(gpu_correctness, "GROUPS", (indexer.check_index,))
    assert gpu_check.main(["--interpret", "--json", str(tmp_path / "r.json"), "--seconds", "0"]) == 1
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert not report["ok"] and not report["is_complete"] and len(report["rows"]) == 1
    assert "ZeroDivisionError" in report["checks"][-1]["problem"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    assert gpu_check.main([]) == gpu_check.NO_GPU
    assert capsys.readouterr().err == "gpu-check: torch finds no GPU; nothing was checked\n"
