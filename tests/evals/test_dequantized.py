"""The BF16 copy holds every tensor of the source once, dequantized or byte for byte, and loads strictly."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

from quantkit.data import MODELS, bundled_model
from quantkit.errors import SourceError, UsageError
from quantkit_evals.dequantized import plain_config, write_bf16_copy
from quantkit_evals.models import load_model


def read_all(directory):
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_of_a_bundled_model(name, tmp_path):
    source, copy = read_all(bundled_model(name)), read_all(write_bf16_copy(name, tmp_path / "copy"))
    expected = {n for n in source if not n.endswith("_scale_inv") and not n.startswith("model.layers.6.")}
    assert copy.keys() == expected
    for tensor, value in copy.items():
        if source[tensor].dtype == torch.float8_e4m3fn:
            rows, columns = source[tensor].shape
            scale = source[f"{tensor}_scale_inv"].float()
            scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            assert torch.equal(value, (source[tensor].float() * scale).bfloat16()), tensor
        else:
            assert value.dtype == source[tensor].dtype
            assert torch.equal(value, source[tensor]), tensor


def test_config_index_and_side_files(tmp_path):
    copy = write_bf16_copy(bundled_model("tiny-glm"), tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    source = json.loads((bundled_model("tiny-glm") / "config.json").read_text())
    assert config == {k: v for k, v in source.items() if k != "quantization_config"} | {"dtype": "bfloat16"}
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    tensors = read_all(copy)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for side in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (copy / side).read_bytes() == (bundled_model("tiny-glm") / side).read_bytes()


def test_nested_config():
    nested = {
        "text_config": {"quantization_config": {}, "torch_dtype": "float16", "x": 1},
        "quantization_config": {},
    }
    assert plain_config(nested) == {"text_config": {"x": 1, "dtype": "bfloat16"}, "dtype": "bfloat16"}


def test_int4_and_channel_scales(tmp_path):
    """A hand-made checkpoint of compressed-tensors: INT4 groups of 32, and FP8 with one scale per row."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-8, 8, (6, 64), generator=generator, dtype=torch.int8)
    int4_scale = (torch.rand(6, 2, generator=generator) + 0.5).bfloat16()
    fp8 = torch.randn(5, 48, generator=generator).to(torch.float8_e4m3fn)
    row_scale = torch.rand(5, 1, generator=generator).bfloat16()
    source = tmp_path / "source"
    source.mkdir()
    tensors = {
        "model.layers.0.mlp.experts.0.up_proj.weight_packed": pack_to_int32(q, 4),
        "model.layers.0.mlp.experts.0.up_proj.weight_scale": int4_scale,
        "model.layers.0.mlp.experts.0.up_proj.weight_shape": torch.tensor([6, 64]),
        "model.layers.0.self_attn.o_proj.weight": fp8,
        "model.layers.0.self_attn.o_proj.weight_scale": row_scale,
        "model.norm.weight": torch.randn(7, generator=generator),
    }
    save_file(tensors, source / "model.safetensors")
    groups = {
        "a": {"targets": ["re:.*experts.*"], "format": "pack-quantized", "weights": _args(4, "int", "group", 32)},
        "b": {
            "targets": ["re:.*o_proj"],
            "format": "float-quantized",
            "weights": _args(8, "float", "channel", None),
        },
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    (source / "config.json").write_text(json.dumps({"num_hidden_layers": 1, "quantization_config": config}))
    copy = read_all(write_bf16_copy(source, tmp_path / "copy"))
    expected_int4 = q.float() * int4_scale.float().repeat_interleave(32, 1)
    assert torch.equal(copy["model.layers.0.mlp.experts.0.up_proj.weight"], expected_int4.bfloat16())
    expected_fp8 = fp8.float() * row_scale.float()
    assert torch.equal(copy["model.layers.0.self_attn.o_proj.weight"], expected_fp8.bfloat16())
    assert torch.equal(copy["model.norm.weight"], tensors["model.norm.weight"])
    assert len(copy) == 3


def _args(bits, kind, strategy, group_size):
    return {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group_size, "symmetric": True}


def test_never_into_a_directory_with_something_in_it(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        write_bf16_copy("tiny-glm", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_load_refuses_what_transformers_would_fill_with_noise(tmp_path):
    copy = write_bf16_copy("tiny-qwen3", tmp_path / "copy")
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    name = "model.layers.0.self_attn.q_proj.weight"
    file = copy / index["weight_map"][name]
    whole = load_file(file)
    save_file({k: v for k, v in whole.items() if k != name}, file, metadata={"format": "pt"})
    with pytest.raises(SourceError, match=rf"1 weights are missing, first {name}"):
        load_model(copy)
    save_file(whole | {"model.layers.0.extra.weight": torch.zeros(2)}, file, metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"1 weights are unknown, first model\.layers\.0\.extra"):
        load_model(copy)


def test_importing_the_package_imports_no_torch():
    modules = "text, statistics, perplexity, fidelity, dequantized, models, demo"
    code = (
        f"import sys; from quantkit_evals import {modules}; print({{'torch', 'transformers'}} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_logits_are_those_of_weights_dequantized_by_hand(tmp_path):
    model = load_model(write_bf16_copy("tiny-qwen3", tmp_path / "copy"), dtype="float32")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    source = read_all(bundled_model("tiny-qwen3"))
    name = "model.layers.3.self_attn.o_proj.weight"
    scale = source[f"{name}_scale_inv"].float()
    by_hand = (source[name].float() * torch.kron(scale, torch.ones(128, 128))).bfloat16().float()
    assert np.array_equal(dict(model.named_parameters())[name].detach().numpy(), by_hand.numpy())
