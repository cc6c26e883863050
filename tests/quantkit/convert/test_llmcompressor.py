"""llm-compressor itself, in the environment that QUANTKIT_PEER_PYTHON names (it is no dependency of the tests)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from quantkit.artifact import Artifact
from tests.quantkit.convert.cases import core_digests, run

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("QUANTKIT_PEER_PYTHON")
pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="QUANTKIT_PEER_PYTHON names no interpreter that has llmcompressor"
)


def peer(*arguments: str | Path) -> str:
    assert PYTHON is not None
    path = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "recipes", "serve", "evals"))
    done = subprocess.run(
        [PYTHON, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=900,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("model", "method"), [("tiny-glm", "gptq"), ("tiny-qwen3", "gptq"), ("tiny-glm", "autoround")]
)
def test_its_weights_as_it_would_store_them(model: str, method: str, tmp_path: Path) -> None:
    """Codes and scales are those that compressed-tensors makes of the model; nothing else of it was touched."""
    found = json.loads(peer("-m", "tests.quantkit.convert.engine_peer", model, method, tmp_path / "out"))
    assert found["targets"] == 16 * 3 and found["differ"] == [] and found["changed"] == []
    assert found["problems"] == [] and found["engine"].startswith("llmcompressor ")
    assert ("auto-round" in found["engine"]) == (method == "autoround")
    assert 0.05 < found["worst"] < 0.35  # rtn has 0.11; GPTQ accepts more for a smaller error of the output
    ours = tmp_path / "ours"
    run(model, ours, method="rtn", layers="2", group_size=64)
    same = core_digests(ours).items() & core_digests(tmp_path / "out").items()
    shared = {name for name, _ in same}
    assert {n for n in core_digests(ours) if n.startswith("prefill/") and not n.endswith("_view.json")} <= shared
    assert {"decode/config.json", "decode/model-layer-00003.safetensors"} <= shared
    differ = (
        Artifact.open(ours).decode.tensors.tensors.keys() ^ Artifact.open(tmp_path / "out").decode.tensors.tensors
    )
    assert not differ


def test_command_line_keeps_stdout_for_data(tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = peer(
        "-m", "quantkit", "convert", "tiny-glm", "--engine", "llmcompressor", "--method", "gptq", "--samples", "2",
        "--length", "16", "--layers", "1", "--json", "-o", out,
    )  # fmt: skip
    assert json.loads(said)["artifact"] == str(out)
