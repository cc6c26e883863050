"""Ctrl-C on a real conversion: exit code 130, a state that can be resumed, and the same bytes as without it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.builders import write_moe

from .conftest import environment, process


def test_ctrl_c_leaves_a_resumable_state(tmp_path: Path) -> None:
    source = write_moe(tmp_path / "source", "deepseek_v3", layers=8, experts=8)
    out, work = tmp_path / "w4", tmp_path / "w4.partial"
    # The torch twin is slow enough to be met in the middle of the work; the resumed run uses what is there.
    convert = ("convert", source, "--method", "mse", "--json")
    command = [sys.executable, "-m", "quantkit", *map(str, convert), "-o", str(out), "-j", "1"]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(QUANTKIT_KERNELS="torch"),
    )
    until = time.monotonic() + 60
    while time.monotonic() < until and child.poll() is None and not any(work.glob("decode/model-layer-*")):
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    printed, said = child.communicate(timeout=60)
    assert child.returncode == 130, said
    failure = json.loads(printed)
    assert failure["exit_code"] == 130 and "same command again" in failure["error"]["hint"]
    assert "Traceback" not in said
    assert work.is_dir() and not out.exists()

    resumed = process(*convert, "-o", out)
    assert resumed.code == 0, resumed.err
    whole = process(*convert, "-o", tmp_path / "undisturbed")
    assert json.loads(resumed.out)["views"] == json.loads(whole.out)["views"]
    assert not work.exists()


def test_ctrl_c_before_any_work_is_130_too(capsys: object) -> None:
    # A command that reads from a pipe nobody writes to: the signal arrives while it only plans.
    code = "import signal, os\nfrom quantkit.cli import main\nimport quantkit.api as api\n"
    code += "def hang(*a, **k):\n    os.kill(os.getpid(), signal.SIGINT)\n    signal.pause()\n"
    code += "api.resolve = hang\nraise SystemExit(main.main(['plan', 'tiny-glm']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert "error: interrupted" in done.stderr and "Traceback" not in done.stderr
