"""The decode view read by compressed-tensors and run by transformers, neither of which we wrote.

Weights: every packed and every FP8 block tensor decompresses to our bits. Models: with a BF16 rest nothing is
quantized at run time, so transformers with compressed-tensors must give the very logits of our BF16 copy.
"""

from __future__ import annotations

import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors import safe_open

import quantkit
from quantkit.data import MODELS
from quantkit.errors import SourceError
from quantkit.models.engine_rules import Level
from quantkit.models.engines import check, verdict
from quantkit.recipe.sections import BudgetSection
from quantkit_evals.dequantized import dequantize_bf16, write_bf16_copy
from quantkit_evals.models import load_model
from quantkit_evals.text import token_blocks

EXPERT = re.compile(r"\.mlp\.experts\.\d+\.(gate|up|down)_proj$")


def read_view(directory):
    """All tensors of a view by name, through the safetensors library."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            tensors |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (no mapping)
    return tensors


def scheme_of(config: QuantizationConfig, module: str) -> QuantizationScheme | None:
    """The group whose targets match a module, as engines choose it: ignore first, then the first match."""

    def matches(pattern: str) -> bool:
        if pattern.startswith("re:"):
            return re.match(pattern.removeprefix("re:"), module) is not None
        return pattern == module

    if any(matches(p) for p in config.ignore):
        return None
    return next((g for g in config.config_groups.values() if any(matches(t) for t in g.targets)), None)


# Between the errors of layer 1 of tiny-glm, which is kept then, and those of the others.
KEPT = {"budget": BudgetSection(max_relative_error=0.089, action=("keep-fp8",))}
CASES = [
    ("tiny-glm", KEPT),
    ("tiny-glm", {"group_size": 32}),
    ("tiny-glm", {"group_size": 128, "method": "rtn"}),
    ("tiny-qwen3", {"group_size": 64}),
    ("tiny-glm", {"linears": "all"}),
]


@pytest.mark.parametrize(("model", "options"), CASES)
def test_every_tensor_decompresses_to_our_bits(model, options, artifact):
    view = artifact(model, **options).decode
    tensors = read_view(view.path)
    config = QuantizationConfig.model_validate(view.tensors.config["quantization_config"])
    counted = {"pack-quantized": 0, "float-quantized": 0, None: 0}
    for module, weight in view.tensors.weights().items():
        scheme = scheme_of(config, module)
        counted[scheme.format if scheme else None] += 1
        if scheme is None:
            assert tensors[f"{module}.weight"].dtype in (torch.bfloat16, torch.float32), module
            continue
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        names = compressor.compression_param_names(scheme)
        theirs = compressor.decompress({n: tensors[f"{module}.{n}"] for n in names}, scheme)["weight"]
        exact = torch.from_numpy(view[module].dequantize())
        bf16 = torch.from_numpy(dequantize_bf16(view.tensors, weight).view(np.int16)).view(torch.bfloat16)
        if scheme.format == "pack-quantized":  # they return bf16(q * scale)
            assert theirs.dtype == torch.bfloat16
            assert torch.equal(theirs.view(torch.int16), exact.bfloat16().view(torch.int16)), module
        elif tensors[f"{module}.weight_scale"].dtype == torch.float32:  # they return the float32 product
            assert theirs.dtype == torch.float32
            assert torch.equal(theirs.view(torch.int32), exact.view(torch.int32)), module
        else:  # BF16 scales: the product in BF16
            assert theirs.dtype == torch.bfloat16
        assert torch.equal(theirs.bfloat16().view(torch.int16), bf16.view(torch.int16)), module
    kept = 48 if "budget" in options else 0
    routed = 240 - kept if model == "tiny-glm" else 288  # experts outside the MTP layer, three projections each
    assert counted["pack-quantized"] == routed if "linears" not in options else counted["pack-quantized"] > routed
    assert counted["float-quantized"] > 0
    assert counted[None] > 0


@pytest.mark.parametrize("model", MODELS)
def test_bf16_rest_gives_the_logits_of_our_dequantized_weights(model, artifact, tmp_path):
    view = artifact(model, rest="bf16").decode.path
    theirs, ours = load_model(view), load_model(write_bf16_copy(view, tmp_path / "bf16"))
    blocks = torch.from_numpy(token_blocks(view, num_blocks=1, block_tokens=192))  # beyond index_topk: sparse
    with torch.inference_mode():
        assert torch.equal(theirs(blocks).logits, ours(blocks).logits)


@pytest.mark.parametrize("model", MODELS)
def test_fp8_rest_loads_the_right_weights_and_runs_close_to_them(model, artifact, tmp_path):
    """Weight by weight; linears in FP8 stay FP8 in the model, experts are decompressed to BF16.

    transformers 5.17 casts the float32 block scales to the dtype of the model, here BF16: what runs there is not
    quite what is stored (the next test loads them exactly).
    """
    view = artifact(model).decode.path
    theirs, ours = load_model(view), load_model(write_bf16_copy(view, tmp_path / "bf16"))
    stored = read_view(view)
    state = theirs.state_dict()
    num_fp8 = 0
    for name, mine in ours.state_dict().items():
        value = state[name]
        if value.dtype == torch.float8_e4m3fn:
            num_fp8 += 1
            module = name.removesuffix(".weight")
            assert torch.equal(value.view(torch.uint8), stored[name].view(torch.uint8)), name
            assert torch.equal(state[f"{module}.weight_scale"], stored[f"{module}.weight_scale"].bfloat16()), name
        else:
            assert torch.equal(value.float(), mine.float()), name
    assert num_fp8 > 0
    # activations are quantized at run time: near our BF16 copy, not equal
    blocks = torch.from_numpy(token_blocks(view, num_blocks=1, block_tokens=96))
    with torch.inference_mode():
        p, q = ours(blocks).logits.float().log_softmax(-1), theirs(blocks).logits.float().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    assert 0 < kl < 0.01


def test_fp8_rest_in_float32_keeps_the_scales(artifact):
    view = artifact("tiny-glm").decode.path
    stored, state = read_view(view), load_model(view, dtype="float32").state_dict()
    scales = [name for name in state if name.endswith(".weight_scale")]
    assert scales
    for name in scales:
        assert torch.equal(state[name], stored[name]), name


def test_mtp_layer_stays_as_published(artifact):
    """transformers has no MTP layer, so its tensors are compared with the source."""
    made = artifact("tiny-glm").decode
    with quantkit.open("tiny-glm") as source:
        layer = [m for m in source.weights() if m.startswith("model.layers.6.")]
        assert sum(bool(EXPERT.search(m)) for m in layer) == 48
        for module in layer:
            assert np.array_equal(made.tensors.array(f"{module}.weight"), source.array(f"{module}.weight")), module


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rest": "bf16"},
        {"layers": "2-3"},
        {"layers": "2-3", "rest": "bf16"},
        {"linears": "all"},
        KEPT,
        {"rest": "bf16", **KEPT},
    ],
    ids=str,
)
def test_transformers_finds_every_weight_where_the_rules_say_so(model, options, artifact):
    """Where they say no, transformers refuses (FP8 rest) or warns and computes with random experts (BF16 rest)."""
    made = artifact(model, **options)
    view, is_amended = made.decode, bool(made.manifest.plan_amendments)
    config = view.tensors.config
    found = check(config, config["quantization_config"], "transformers", 1, modules=view.tensors.weights())
    fits = verdict(found) is not Level.NO
    assert is_amended == ("budget" in options and model == "tiny-glm")
    assert fits == ("layers" not in options and not is_amended)
    with (
        nullcontext()
        if fits
        else pytest.raises((SourceError, RuntimeError), match=r"missing|issues during automatic conversion")
    ):
        load_model(view.path)
