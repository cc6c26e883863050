"""The scripts that made the bundled models still run, and make checkpoints that our reader understands."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from quantkit.checkpoint import open_checkpoint
from quantkit.checkpoint.tensor import Storage
from quantkit.data import MODELS, bundled_model, bundled_text
from tools import export_fp8, train_tiny
from tools.lean_forward import Routing, losses
from tools.tiny_models import SMOKE, make_config, make_model


@pytest.mark.parametrize("architecture", ["glm", "qwen3"])
def test_train_export_read(architecture, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(bundled_text("calib").read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    trained, exported = tmp_path / "trained", tmp_path / "fp8"
    options = ["--smoke", "--steps", "2", "--batch", "2", "--seq", "32", "--validation-tokens", "500"]
    train_tiny.main(["--arch", architecture, "--text", str(text), "--out", str(trained), *options])
    scale_dtype = "BF16" if architecture == "qwen3" else "F32"
    export_fp8.main([str(trained), str(exported), "--scale-dtype", scale_dtype])

    expected = export_fp8.read_trained(trained, SMOKE.num_layers)
    with open_checkpoint(exported) as checkpoint:
        weights = checkpoint.weights()
        fp8 = {m: w for m, w in weights.items() if w.storage is Storage.FP8_BLOCK}
        assert any(".experts." in m for m in fp8)
        assert {w.scale.dtype for w in fp8.values()} == {scale_dtype}
        assert any(f"layers.{SMOKE.num_layers}." in m for m in fp8) == (architecture == "glm")  # the MTP layer
        for module, weight in fp8.items():
            codes = torch.from_numpy(checkpoint.array(weight.weight)).view(torch.float8_e4m3fn).float().numpy()
            scales = checkpoint.scales_float32(weight)
            rows, columns = weight.block
            full = np.kron(scales, np.ones((rows, columns), np.float32))[: codes.shape[0], : codes.shape[1]]
            truth = expected[f"{module}.weight"].float().numpy()
            # e4m3 has 3 mantissa bits (half a step is 1/16), subnormals a step of 2^-9; a BF16 scale adds 2^-9
            assert np.all(np.abs(codes * full - truth) <= np.abs(truth) * (1 / 16 + 1 / 256) + full * 2.0**-10)
        bias = [t for n, t in checkpoint.tensors.items() if "e_score_correction_bias" in n]
        assert {t.dtype for t in bias} == ({"F32"} if architecture == "glm" else set())


@pytest.mark.parametrize("name", MODELS)
def test_export_rule_gives_the_bundled_dtypes(name):
    for file in bundled_model(name).glob("*.safetensors"):
        with safe_open(file, "pt") as f:
            for tensor in f.keys():  # noqa: SIM118 (safe_open is no mapping)
                if not tensor.endswith("_scale_inv"):
                    piece = f.get_slice(tensor)
                    assert piece.get_dtype() == export_fp8.stored_dtype(tensor, len(piece.get_shape())), tensor


@pytest.mark.parametrize("name", MODELS)
def test_exporting_bundled_weights_again_is_stable(name):
    """fp8_block of dequantized bundled weights gives the bundled codes: the script is the one that made them."""
    tensors = {}
    for file in bundled_model(name).glob("*.safetensors"):
        tensors |= load_file(file)
    module = next(m for m in tensors if m.endswith("experts.0.down_proj.weight"))
    scale = tensors[f"{module}_scale_inv"].float()
    grid = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    codes, again = export_fp8.fp8_block(tensors[module].float() * grid)
    assert torch.equal(codes.view(torch.uint8), tensors[module].view(torch.uint8))
    torch.testing.assert_close(again, scale)


@pytest.mark.parametrize("architecture", ["glm", "qwen3"])
def test_lean_forward_agrees_with_transformers(architecture):
    torch.manual_seed(0)
    config = make_config(architecture, SMOKE.vocab, SMOKE)
    model, mtp = make_model(architecture, config)
    with torch.no_grad():  # larger weights, so that a wrong layer shows in the loss
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4)
    x = torch.randint(0, SMOKE.vocab, (2, 34))
    with torch.no_grad():
        loss, _ = losses(model, mtp, x, Routing())
        logits = model(x[:, :-2]).logits.float()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:-1].flatten())
    assert abs(loss.item() - expected.item()) < 0.02 * expected.item()
