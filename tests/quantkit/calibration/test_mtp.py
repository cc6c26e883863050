"""Multi-token-prediction layers: what goes in and comes out, against transformers and plain products; refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quantkit.artifact.dequantize import RowReader, dequantize
from quantkit.calibration.expert import Expert
from quantkit.calibration.experts import Inputs, Routed
from quantkit.calibration.linears import Linears
from quantkit.calibration.mtp import PredictionLayer, continued
from quantkit.calibration.skeleton import Skeleton
from quantkit.calibration.stream import Stream
from quantkit.calibration.weights import routed_experts
from quantkit.calibration.workers import Workers
from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.errors import UnsupportedError, UsageError
from quantkit.models.classify import find_family
from quantkit_evals.dequantized import write_bf16_copy
from quantkit_evals.models import load_model, quiet
from tests.builders import moe, write_checkpoint
from tests.quantkit.calibration.test_stream import TOLERANCE, source_of

SAMPLES = np.random.default_rng(0).integers(0, 64, (23, 96))  # a batch of 21 samples and one of 2
Values = dict[str, torch.Tensor]


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(2)
    yield made
    made.close()


def stream_of(checkpoint: Checkpoint, samples: Any, workers: Workers, predictions: int) -> Stream:
    classifier = find_family(checkpoint.config, checkpoint.tensors)
    skeleton = Skeleton(
        checkpoint, classifier, lambda w, a, b: RowReader(checkpoint, w).float32(a, b), predictions
    )
    return Stream(skeleton, samples, workers)


def streamed(checkpoint: Checkpoint, samples: Any, workers: Workers, predictions: int) -> list[torch.Tensor]:
    """What each layer gives."""
    stream = stream_of(checkpoint, samples, workers, predictions)
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
    found = []
    for _ in range(stream.skeleton.num_layers):
        stream.forward(Work())
        found.append(stream.hidden.clone())
    return found


def plain_tensors(copy: Path) -> Values:
    with open_checkpoint(copy) as checkpoint:
        return {
            name: torch.from_numpy(np.array(checkpoint.array(info))).view(torch.bfloat16).float()
            for name, info in checkpoint.tensors.items()
            if info.dtype == "BF16" and "experts" not in name
        }  # fmt: skip


def with_predictions(source: Path, folder: Path, more: int = 1) -> Path:
    """A copy in plain weights with its prediction layers, which ``write_bf16_copy`` leaves out otherwise."""
    config = json.loads((source / "config.json").read_text())
    if config["model_type"] == "glm4_moe":
        config |= {"use_qk_norm": True, "attention_bias": True}
    longer = folder / "longer"
    longer.mkdir()
    for path in source.iterdir():
        if path.name != "config.json":
            (longer / path.name).symlink_to(path)
    count = config["num_hidden_layers"]
    (longer / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count + more}))
    copy = write_bf16_copy(longer, folder / "copy")
    plain = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(plain | {"num_hidden_layers": count}))
    return copy


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def entry_by_hand(
    tensors: Values, config: dict[str, Any], layer: int, before: torch.Tensor, ids: torch.Tensor, last_norm: str
) -> torch.Tensor:
    """The report's formula, in the open."""
    at, eps = f"model.layers.{layer}", config["rms_norm_eps"]
    table = tensors.get(f"{at}.embed_tokens.weight", tensors["model.embed_tokens.weight"])
    embedded = rms(table[ids], tensors[f"{at}.enorm.weight"], eps)
    hidden = rms(rms(before, tensors[last_norm], eps), tensors[f"{at}.hnorm.weight"], eps)
    return torch.cat([embedded, hidden], -1) @ tensors[f"{at}.eh_proj.weight"].T


def loaded_with(copy: Path, more: int) -> Any:
    """transformers' model with prediction layers as ordinary last layers, whose input a hook exchanges."""
    text = (copy / "config.json").read_text()
    config = json.loads(text)
    config["num_hidden_layers"] += more
    for name, value in (("layer_types", None), ("mlp_layer_types", "sparse"), ("indexer_types", "full")):
        if types := config.get(name):
            config[name] = [*types, *[value or types[-1]] * more]
    (copy / "config.json").write_text(json.dumps(config))
    with quiet():
        model, report = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32, output_loading_info=True)
    (copy / "config.json").write_text(text)
    assert not report["missing_keys"]
    return model


def expected_predictions(copy: Path, main: torch.Tensor, samples: Any, more: int) -> list[torch.Tensor]:
    """Outputs of the prediction layers, by hand and by transformers' layers, behind the last main layer's."""
    config, tensors, ids = json.loads((copy / "config.json").read_text()), plain_tensors(copy), samples
    decoder = loaded_with(copy, more).get_decoder()
    first, before, last_norm = config["num_hidden_layers"], main, "model.norm.weight"
    found = []
    for layer in range(first, first + more):
        tokens = torch.from_numpy(ids[:, layer - first + 1 :])
        inputs = entry_by_hand(tensors, config, layer, before[:, :-1], tokens, last_norm)
        seen: list[torch.Tensor] = []
        hooks = [
            decoder.layers[layer].register_forward_pre_hook(lambda m, a, x=inputs: (x, *a[1:])),
            decoder.layers[layer].register_forward_hook(
                lambda m, a, out, seen=seen: seen.append(out[0] if isinstance(out, tuple) else out)
            ),
        ]
        with torch.no_grad():
            decoder(tokens)
        for hook in hooks:
            hook.remove()
        before, last_norm = seen[0], f"model.layers.{layer}.shared_head.norm.weight"
        found.append(before)
    return found


def two_predictions(folder: Path) -> Path:
    """deepseek_v3 with a second prediction layer of other weights."""
    tensors, config = moe("deepseek_v3")
    others, _ = moe("deepseek_v3", layers=3, seed=1)
    tensors |= {name: raw for name, raw in others.items() if name.startswith("model.layers.3.")}
    return write_checkpoint(folder, tensors, config | {"num_nextn_predict_layers": 2})


@pytest.mark.parametrize("family", ["tiny-glm", "glm_moe_dsa", "deepseek_v3", "deepseek_v32", "glm4_moe"])
def test_prediction_layer_equals_transformers_layer_on_the_reports_input(
    family: str, tmp_path: Path, workers: Workers
) -> None:
    copy = with_predictions(source_of(family, tmp_path), tmp_path)
    with open_checkpoint(copy) as checkpoint:
        ours = streamed(checkpoint, SAMPLES, workers, 1)
    (theirs,) = expected_predictions(copy, ours[-2], SAMPLES, 1)
    assert ours[-1].shape == (23, 95, 256)
    assert float((ours[-1] - theirs).abs().max() / theirs.abs().max()) < 4 * TOLERANCE


def test_a_further_prediction_layer_starts_from_the_one_before(tmp_path: Path, workers: Workers) -> None:
    copy = with_predictions(two_predictions(tmp_path / "source"), tmp_path, 2)
    with open_checkpoint(copy) as checkpoint:
        ours = streamed(checkpoint, SAMPLES, workers, 2)
    for found, theirs in zip(ours[-2:], expected_predictions(copy, ours[-3], SAMPLES, 2), strict=True):
        assert found.shape == theirs.shape
        assert float((found - theirs).abs().max() / theirs.abs().max()) < 4 * TOLERANCE


def test_transformers_own_prediction_model_agrees(tmp_path: Path, workers: Workers) -> None:
    """Its ``MtpModel`` exists for a few model types; it takes the model's table of embeddings."""
    from transformers.modeling_layers import MtpModel

    tensors, config = moe("deepseek_v3")
    tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    copy = with_predictions(write_checkpoint(tmp_path / "source", tensors, config), tmp_path)
    with open_checkpoint(copy) as checkpoint:
        ours = streamed(checkpoint, SAMPLES, workers, 1)[-1]
    model = load_model(copy, dtype="float32")
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\."]  # where it looks for the layer's weights
    with quiet():
        layer = MtpModel.from_pretrained(model).layers[0]
    decoder, ids = model.get_decoder(), torch.from_numpy(SAMPLES)
    with torch.no_grad():
        hidden = decoder(ids).last_hidden_state[:, :-1]
        positions = torch.arange(1, ids.shape[1]).unsqueeze(0)
        seen: list[torch.Tensor] = []
        layer.mtp_block.register_forward_hook(lambda m, a, out: seen.append(out))
        layer(
            decoder.embed_tokens(ids[:, 1:]), hidden, attention_mask=None, position_ids=positions,
            position_embeddings=decoder.rotary_emb(hidden, position_ids=positions), past_key_values=None,
        )  # fmt: skip
    assert float((ours - seen[0]).abs().max() / seen[0].abs().max()) < 4 * TOLERANCE


@pytest.mark.parametrize("gone", ["enorm.weight", "input_layernorm.weight", "self_attn.o_proj.weight"])
def test_a_layer_that_lacks_something_is_refused_naming_it(gone: str, tmp_path: Path, workers: Workers) -> None:
    tensors, config = moe("deepseek_v3")
    tensors = {name: raw for name, raw in tensors.items() if not name.startswith(f"model.layers.2.{gone}")}
    source = write_checkpoint(tmp_path / "source", tensors, config)
    with open_checkpoint(source) as checkpoint, pytest.raises(UnsupportedError) as caught:
        stream_of(checkpoint, SAMPLES, workers, 1)
    assert "decode.mtp" in str(caught.value) and gone.removesuffix(".weight") in str(caught.value)


def test_an_indexer_that_another_layer_shares_is_refused(tmp_path: Path, workers: Workers) -> None:
    tensors, config = moe("glm_moe_dsa")
    tensors = {name: raw for name, raw in tensors.items() if ".2.self_attn.indexer." not in name}
    source = write_checkpoint(tmp_path / "source", tensors, config)
    with open_checkpoint(source) as checkpoint, pytest.raises(UnsupportedError, match="shares the indexer"):
        stream_of(checkpoint, SAMPLES, workers, 1)


def test_several_kinds_of_attention_are_refused() -> None:
    config = SimpleNamespace(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(UnsupportedError, match="several kinds of attention"):
        continued(config, [PredictionLayer(2)])


def test_samples_without_a_later_token_are_refused(tmp_path: Path, workers: Workers) -> None:
    with (
        open_checkpoint(two_predictions(tmp_path / "source")) as checkpoint,
        pytest.raises(UsageError, match="3 or more"),
    ):
        stream_of(checkpoint, SAMPLES[:, :2], workers, 2)
