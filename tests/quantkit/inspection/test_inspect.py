"""Descriptions of checkpoints of every family, from headers only."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.inspection.inspect import describe_checkpoint
from tests.builders import FAMILIES, f32, write_checkpoint, write_moe, zeros


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("tensor data was read")

    monkeypatch.setattr(Checkpoint, "read_into", never)
    with open_checkpoint(write_moe(tmp_path, family)) as checkpoint:
        found = describe_checkpoint(checkpoint)
        assert (found.what, found.family, found.layers, found.experts) == ("checkpoint", family, 2, 4)
        assert found.mtp_layers == (family in ("glm_moe_dsa", "deepseek_v3", "deepseek_v32", "glm4_moe"))
        assert found.nbytes == sum(t.nbytes for t in checkpoint.tensors.values())
        for shares in (found.by_role, found.by_dtype, found.by_storage):
            assert sum(s.nbytes for s in shares) == found.nbytes
            assert [s.nbytes for s in shares] == sorted((s.nbytes for s in shares), reverse=True)
        storage = {"kimi_k25": "int4-group", "glm4_moe": "fp8-channel"}.get(family, "fp8-block")
        assert storage in {s.name for s in found.by_storage}
        found.to_json()


def test_a_model_without_experts_is_described_with_a_warning(tmp_path: Path) -> None:
    import numpy as np

    tensors = {"model.layers.0.mlp.up_proj.weight": f32(np.ones((4, 4), np.float32)), "z": zeros("C64", (2,), 8)}
    with open_checkpoint(write_checkpoint(tmp_path, tensors, {"model_type": "llama"})) as checkpoint:
        found = describe_checkpoint(checkpoint)
    assert found.family is None and found.model_type == "llama" and found.by_role == ()
    assert any("no routed experts" in w for w in found.warnings)
