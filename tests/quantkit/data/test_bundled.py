"""What ships is what was pinned, and is found by name."""

from __future__ import annotations

import json
import shutil

import pytest

import quantkit.data as data
from quantkit.errors import UsageError


def test_every_bundled_file_has_its_pinned_digest():
    assert data.verify_bundled() == []
    assert {k.split("/")[1] for k in data.pinned_digests() if k.startswith("models/")} == set(data.MODELS.values())


@pytest.mark.parametrize("name", data.MODELS)
def test_models_are_complete_checkpoints(name):
    folder = data.bundled_model(name)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {p.name for p in folder.glob("*.safetensors")} == set(index["weight_map"].values())
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"


def test_texts_do_not_overlap():
    """Nothing that calibration may see is measured on."""
    documents = [set(data.bundled_text(n).read_text(encoding="utf-8").split("\n\n")) for n in ("calib", "heldout")]
    assert not documents[0] & documents[1]


def test_unknown_names_say_what_exists():
    with pytest.raises(UsageError, match="tiny-glm, tiny-qwen3"):
        data.bundled_model("tiny-gml")
    with pytest.raises(UsageError, match="calib, heldout"):
        data.bundled_text("held-out")
    with pytest.raises(UsageError):
        data.verify_bundled("nothing")


def test_verify_finds_changes(tmp_path, monkeypatch):
    root = tmp_path / "data"
    (root / "text").mkdir(parents=True)
    (root / "models").mkdir()
    shutil.copyfile(data.bundled_text("calib"), root / "text" / "calib.txt")
    with (root / "text" / "calib.txt").open("r+b") as f:
        f.write(b"X")
    (root / "text" / "calib.txt.orig").write_text("stray")
    pins = {k: v for k, v in data.pinned_digests().items() if k.startswith("text/")}
    (root / "digests.json").write_text(json.dumps(pins))
    monkeypatch.setattr(data, "ROOT", root)
    problems = data.verify_bundled()
    assert len(problems) == 3
    assert any("calib.txt: sha256" in p for p in problems)
    assert "text/heldout.txt: missing" in problems
    assert "text/calib.txt.orig: not pinned" in problems
