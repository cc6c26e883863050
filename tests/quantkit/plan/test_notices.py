"""Sources that can be converted but are not quite what quantkit knows: the user hears of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from quantkit.checkpoint import open_checkpoint
from quantkit.plan import build_plan
from tests.builders import write_moe
from tests.recipes import data_free_recipe


def warnings_of(folder: Path) -> str:
    with open_checkpoint(folder) as checkpoint:
        return "\n".join(build_plan(checkpoint, data_free_recipe()).warnings)


def test_an_unknown_method_is_named(tmp_path: Path) -> None:
    write_moe(tmp_path, "glm_moe_dsa")
    assert warnings_of(tmp_path) == ""
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["quant_method"] = "mxfp4"
    path.write_text(json.dumps(config))
    assert "'mxfp4'" in warnings_of(tmp_path)


def test_fused_experts_are_named(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    write_moe(tmp_path, "glm_moe_dsa")
    save_file(
        {"model.layers.1.mlp.experts.gate_up_proj": np.zeros((2, 4, 4), np.float32)}, tmp_path / "x.safetensors"
    )
    assert "experts.gate_up_proj: experts fused" in warnings_of(tmp_path)
