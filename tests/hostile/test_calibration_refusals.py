"""Calibrated conversions on disks that refuse; hostile texts, tokenizers and activations have tests of their own
(tests/quantkit/calibration/test_samples.py, tests/quantkit/convert/test_calibrated.py)."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.artifact import verify_artifact
from tests.builders import write_moe
from tests.quantkit.convert.cases import core_digests
from tests.quantkit.convert.test_calibrated import run, samples_of

ROOT = Path(__file__).parents[2]
LIMIT = 3 << 20  # bytes of a file: the weight files are smaller, hidden states of 16 x 256 tokens are not
CODE = """
import sys
from pathlib import Path
from quantkit.calibration import memory
from quantkit.errors import QuantkitError
from tests.quantkit.convert.test_calibrated import run, samples_of
if sys.argv[3] == "array":
    memory.DEFAULT_ARRAY_BYTES = 0
try:
    run(Path(sys.argv[1]), Path(sys.argv[2]), given=samples_of(16, 256))
except QuantkitError as problem:
    print(problem)
    sys.exit(problem.exit_code)
"""


def limit() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))


@pytest.mark.parametrize("what", ["state", "array"])
def test_hidden_states_that_the_disk_has_no_room_for(what: str, tmp_path: Path) -> None:
    """A real refusal by the kernel, while the state of a layer is saved or mapped arrays get their blocks."""
    source = write_moe(tmp_path / "source", "glm_moe_dsa")
    done = subprocess.run(
        [sys.executable, "-c", CODE, source, tmp_path / "out", what],
        cwd=ROOT, preexec_fn=limit, capture_output=True, text=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert "no space left" in done.stdout and f"calibration/{what}-" in done.stdout
    assert not (tmp_path / "out").exists()
    if what == "state":  # the next run goes on from what is there
        for out in ("out", "whole"):
            run(source, tmp_path / out, given=samples_of(16, 256))
        assert verify_artifact(tmp_path / "out").ok
        assert core_digests(tmp_path / "out") == core_digests(tmp_path / "whole")
