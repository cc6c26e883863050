"""The streamed forward pass against transformers' own, whole and in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.artifact.dequantize import RowReader, dequantize
from quantkit.calibration.expert import Expert
from quantkit.calibration.experts import Inputs, Routed
from quantkit.calibration.linears import Linears
from quantkit.calibration.skeleton import Skeleton
from quantkit.calibration.stream import Stream
from quantkit.calibration.weights import routed_experts
from quantkit.calibration.workers import Workers
from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.data import bundled_model
from quantkit.errors import SourceError, UnsupportedError
from quantkit.models.classify import find_family
from quantkit_evals.dequantized import write_bf16_copy
from quantkit_evals.models import load_model
from tests.builders import write_moe

FAMILIES = (
    "tiny-glm", "tiny-qwen3", "glm_moe_dsa", "deepseek_v3", "deepseek_v32", "kimi_k2", "qwen3_moe", "glm4_moe",
    "minimax_m2", "mixtral",
)  # fmt: skip
TOLERANCE = 5e-7  # of the largest hidden state; sums of experts in another order


def source_of(family: str, folder: Path) -> Path:
    return bundled_model(family) if family.startswith("tiny") else write_moe(folder / "source", family)


def bf16_copy(family: str, folder: Path) -> Path:
    """What both sides read: plain weights, so that the oracle needs none of our dequantization."""
    copy = write_bf16_copy(source_of(family, folder), folder / "copy")
    config = json.loads((copy / "config.json").read_text())
    if family == "glm4_moe":
        config |= {"use_qk_norm": True, "attention_bias": True}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def whole_model(copy: Path, samples: np.ndarray[Any, Any]) -> list[torch.Tensor]:
    """Output of every layer, by transformers."""
    config = json.loads((copy / "config.json").read_text())
    if config["model_type"] == "kimi_k2":  # transformers knows it under the name of its architecture only
        (copy / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
    model = load_model(copy, dtype="float32")
    (copy / "config.json").write_text(json.dumps(config))
    seen: list[torch.Tensor] = []
    for layer in model.get_decoder().layers:
        layer.register_forward_hook(lambda m, a, out: seen.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        model(torch.from_numpy(samples))
    return seen


def stream_of(checkpoint: Checkpoint, samples: np.ndarray[Any, Any], workers: Workers) -> Stream:
    classifier = find_family(checkpoint.config, checkpoint.tensors)
    return Stream(
        Skeleton(checkpoint, classifier, lambda w, a, b: RowReader(checkpoint, w).float32(a, b)), samples, workers
    )


def streamed(checkpoint: Checkpoint, samples: np.ndarray[Any, Any], workers: Workers) -> Iterator[torch.Tensor]:
    stream = stream_of(checkpoint, samples, workers)
    experts = routed_experts(checkpoint, find_family(checkpoint.config, checkpoint.tensors))

    class Work:
        def linears(self, linears: Linears) -> None:
            pass

        def expert(self, expert: int, routed: Routed, inputs: Inputs) -> torch.Tensor:
            weights = {p: dequantize(checkpoint, w) for p, w in experts[stream.position, expert].items()}
            return routed.outputs(Expert(weights, stream.skeleton.experts(stream.position)._apply_gate))

        def settled(self) -> bool:
            return True

        def give_up(self) -> None:
            raise AssertionError

    stream.embed()
    for _ in range(stream.skeleton.num_layers):
        stream.forward(Work())
        yield stream.hidden.clone()


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(2)
    yield made
    made.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_equal_the_whole_model(family: str, tmp_path: Path, workers: Workers) -> None:
    copy = bf16_copy(family, tmp_path)
    samples = np.random.default_rng(0).integers(0, 64, (23, 96))  # a batch of 21 samples and one of 2
    with open_checkpoint(copy) as checkpoint:
        pairs = zip(streamed(checkpoint, samples, workers), whole_model(copy, samples), strict=True)
        for number, (ours, theirs) in enumerate(pairs):
            difference = float((ours - theirs).abs().max() / theirs.abs().max())
            assert difference < TOLERANCE, f"layer {number}: {difference}"


@pytest.mark.parametrize("family", ["tiny-glm", "glm4_moe"])
def test_fp8_weights_are_read_exactly(family: str, tmp_path: Path, workers: Workers) -> None:
    """Block and channel scales: the layer's parameters are code times scale, and no bfloat16 number."""
    with open_checkpoint(source_of(family, tmp_path)) as checkpoint:
        skeleton = stream_of(checkpoint, np.zeros((1, 8), np.int64), workers).skeleton
        with skeleton.loaded(0) as layer:
            name, stored = next(
                (m, w) for m, w in checkpoint.weights().items() if m.endswith("layers.0.self_attn.o_proj")
            )
            scales = checkpoint.scales_float32(stored).repeat(stored.block[0], 0).repeat(stored.block[1], 1)
            codes = torch.from_numpy(checkpoint.array(stored.weight)).view(torch.float8_e4m3fn).float().numpy()
            expected = codes * scales[: stored.shape[0], : stored.shape[1]]
            assert np.array_equal(layer.self_attn.o_proj.weight.numpy(), expected), name


def test_experts_and_idle_layers_hold_no_memory(workers: Workers) -> None:
    with open_checkpoint("tiny-glm") as checkpoint:
        skeleton = stream_of(checkpoint, np.zeros((1, 8), np.int64), workers).skeleton
        with skeleton.loaded(3) as layer:
            on_meta = {n for n, p in layer.named_parameters() if p.device.type == "meta"}
            assert on_meta == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
        assert all(p.device.type == "meta" for p in layer.parameters())


def test_number_of_threads_changes_no_bit() -> None:
    samples = np.random.default_rng(1).integers(0, 4096, (40, 64))
    found = []
    for count in (1, 3):
        workers = Workers(count)
        with open_checkpoint("tiny-glm") as checkpoint:
            found.append([hidden.numpy() for hidden in streamed(checkpoint, samples, workers)])
        workers.close()
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


def test_missing_weight_is_named(tmp_path: Path, workers: Workers) -> None:
    from tests.builders import moe, write_checkpoint

    tensors, config = moe("qwen3_moe")
    del tensors["model.layers.1.input_layernorm.weight"]
    source = write_checkpoint(tmp_path / "source", tensors, config)
    with open_checkpoint(source) as checkpoint:
        found = streamed(checkpoint, np.zeros((2, 8), np.int64), workers)
        next(found)
        with pytest.raises(SourceError, match=r"model\.layers\.1\.input_layernorm\.weight"):
            next(found)


def test_unknown_model_is_refused(tmp_path: Path, workers: Workers) -> None:
    from tests.builders import moe, write_checkpoint

    tensors, config = moe("qwen3_moe")
    config |= {"model_type": "nobody_knows", "architectures": ["NobodyKnows"]}
    source = write_checkpoint(tmp_path / "source", tensors, config)
    with open_checkpoint(source) as checkpoint, pytest.raises(UnsupportedError, match="nobody_knows"):
        stream_of(checkpoint, np.zeros((1, 8), np.int64), workers)
