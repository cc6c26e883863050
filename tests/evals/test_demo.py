"""What `make demo` runs, on few tokens: once from nothing, once into the finished artifact."""

from __future__ import annotations

import re

import pytest

from quantkit.errors import UsageError
from quantkit_evals import demo


def test_demo_runs_and_runs_again(tmp_path, capfd):
    out = tmp_path / "demo-out"
    options = ["--out", str(out), "--model", "tiny-qwen3", "--tokens", "512", "--samples", "16"]
    assert demo.main(options) == 0
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    first = capfd.readouterr().out
    assert demo.main(options) == 0
    second = capfd.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before
    rows = [
        [line for line in text.splitlines() if re.match(r"(FP8|INT4|INT4 as run) +\d", line)]
        for text in (first, second)
    ]
    assert len(rows[0]) == 3
    assert rows[0] == rows[1]
    fp8, int4, _ = (float(re.search(r" (\d+\.\d+) ±", row)[1]) for row in rows[0])
    assert fp8 == pytest.approx(int4, rel=0.02)
    assert fp8 != int4


def test_a_failing_command_ends_the_demo_with_its_code(capfd):
    with pytest.raises(SystemExit) as stop:
        demo.run(["convert"])
    assert stop.value.code == 2


def test_too_few_tokens(tmp_path):
    with pytest.raises(UsageError, match="256 or more"):
        demo.measure(tmp_path, 100)
