"""Linears outside the experts: their inputs against transformers' whole model, their weights by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quantkit_kernels as kernels
from quantkit.artifact.dequantize import dequantize
from quantkit.calibration import Calibrated, Hessian, gptq, round_by_importance
from quantkit.calibration.expert import Expert, ExpertSettings
from quantkit.calibration.experts import Inputs, Routed
from quantkit.calibration.linear import Wanted, calibrate_linears
from quantkit.calibration.linears import Linears
from quantkit.calibration.weights import routed_experts
from quantkit.calibration.workers import Workers
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import UnsupportedError
from quantkit.models.classify import find_family
from quantkit.recipe.treatment import Treatment
from quantkit_evals.models import load_model
from tests.quantkit.calibration.test_stream import bf16_copy, stream_of

SETTINGS = ExpertSettings()
SAMPLES = np.random.default_rng(0).integers(0, 64, (23, 96))  # a batch of 21 samples and one of 2


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(2)
    yield made
    made.close()


def stream_layers(
    copy: Path, samples: Any, workers: Workers, look: Callable[[int, Linears], None], num_layers: int,
    give_up: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """Pass layers while ``look`` is shown the linears of each; returns what comes out."""
    found = []
    with open_checkpoint(copy) as checkpoint:
        stream = stream_of(checkpoint, samples, workers)
        experts = routed_experts(checkpoint, find_family(checkpoint.config, checkpoint.tensors))

        class Work:
            def linears(self, linears: Linears) -> None:
                look(stream.position, linears)

            def expert(self, expert: int, routed: Routed, inputs: Inputs) -> torch.Tensor:
                weights = {p: dequantize(checkpoint, w) for p, w in experts[stream.position, expert].items()}
                return routed.outputs(Expert(weights, stream.skeleton.experts(stream.position)._apply_gate))

            given_up = False

            def settled(self) -> bool:
                return self.given_up or not give_up

            def give_up(self) -> None:
                self.given_up = True

        stream.embed()
        for _ in range(num_layers):
            stream.forward(Work())
            found.append(stream.hidden.clone())
    return found


MLA = ["self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj"]
DENSE = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
SHARED = ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"]
GQA = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MLA_STAGES = [["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"], ["self_attn.q_b_proj"], ["self_attn.o_proj"]]
GQA_STAGES = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]]


@pytest.mark.parametrize(
    ("family", "paths", "stages"),
    [
        ("tiny-glm", [*MLA, *DENSE], [*MLA_STAGES, DENSE[:2], DENSE[2:]]),
        ("tiny-glm", [*SHARED[::-1], *MLA], [*MLA_STAGES, SHARED[:2], SHARED[2:]]),
        ("minimax_m2", GQA, GQA_STAGES),
        ("glm4_moe", [*GQA, *SHARED], [*GQA_STAGES, SHARED[:2], SHARED[2:]]),
    ],
)
def test_inputs_are_those_of_the_whole_model(
    family: str, paths: list[str], stages: list[list[str]], tmp_path: Path, workers: Workers
) -> None:
    layer = 0 if "mlp.gate_proj" in paths else 1
    copy = bf16_copy(family, tmp_path)
    ours: dict[str, torch.Tensor] = {}

    def look(number: int, linears: Linears) -> None:
        if number == layer:
            assert [sorted(stage) for stage in linears.stages(paths)] == [sorted(stage) for stage in stages]
            ours.update({path: torch.cat(list(linears.inputs(path))) for path in paths})

    stream_layers(copy, SAMPLES, workers, look, layer + 1)
    model = load_model(copy, dtype="float32")
    theirs: dict[str, torch.Tensor] = {}

    def hook_of(path: str) -> Any:
        return lambda module, args: theirs.__setitem__(path, args[0].reshape(-1, args[0].shape[-1]))

    for path in paths:
        model.get_decoder().layers[layer].get_submodule(path).register_forward_pre_hook(hook_of(path))
    with torch.no_grad():
        model(torch.from_numpy(SAMPLES))
    assert ours.keys() == theirs.keys()
    for path in paths:
        difference = float((ours[path] - theirs[path]).abs().max() / theirs[path].abs().max())
        assert difference < 2e-6, f"{path}: {difference}"


def wanted_of(paths: list[str], method: str = "gptq") -> list[Wanted]:
    return [Wanted(path, f"checkpoint.{path}", Treatment(method, 32)) for path in paths]


def inputs_by_hooks(layer: Any, paths: list[str], call: Callable[[], Any]) -> dict[str, torch.Tensor]:
    seen: dict[str, torch.Tensor] = {}

    def hook_of(path: str) -> Any:
        return lambda module, args, kwargs: seen.__setitem__(path, (*args, *kwargs.values())[0])

    hooks = [
        layer.get_submodule(path).register_forward_pre_hook(hook_of(path), with_kwargs=True) for path in paths
    ]
    with torch.no_grad():
        call()
    for hook in hooks:
        hook.remove()
    return {path: x.reshape(-1, x.shape[-1]) for path, x in seen.items()}


class Toy(torch.nn.Module):
    """A dense layer in float64 or float32: two linears on one input, one behind them, one behind that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = torch.nn.Linear(64, 96), torch.nn.Linear(64, 96, bias=False)
        self.down, self.last = torch.nn.Linear(96, 64, bias=False), torch.nn.Linear(64, 32, bias=False)
        self.unused, self.twice = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> Any:
        inner = self.down(torch.nn.functional.silu(self.gate(x)) * self.up(input=x))
        return self.last(self.twice(self.twice(inner)) * 0.1 + inner + x)


TOY = ["gate", "up", "down", "last"]
TOY_INPUT = torch.randn(10, 7, 64, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.1, 3, 64)


def calibrate_toy(
    workers: Workers, wanted: list[Wanted], settings: ExpertSettings = SETTINGS
) -> tuple[Toy, dict[str, Calibrated]]:
    toy = Toy()
    batches = [slice(start, start + 3) for start in range(0, 10, 3)]
    linears = Linears(toy, "toy", lambda part: toy(TOY_INPUT[part]), batches, workers)
    return toy, {one.path: result for one, result in calibrate_linears(linears, wanted, settings)}


def by_hand(settings: ExpertSettings, method: str = "gptq") -> tuple[Toy, dict[str, Calibrated]]:
    """Stage by stage in the open: forward, Hessian of all tokens at once in float64, quantize, put back."""
    learning, going_on = Toy(), Toy()
    found: dict[str, Calibrated] = {}
    for stage in (["gate", "up"], ["down"], ["last"]):
        inputs = inputs_by_hooks(learning.double(), stage, lambda: learning(TOY_INPUT.double()))
        x = inputs[stage[0]]
        root = torch.linalg.cholesky(x.T @ x + 1e-9 * torch.eye(x.shape[1])).T.float()
        hessian = Hessian(x.shape[1], where="hand", keep_tokens=0)
        hessian.add(root)
        quantize = gptq if method == "gptq" else round_by_importance
        weights = [Toy().get_submodule(path).weight.detach().numpy() for path in stage]
        for path, result in zip(stage, quantize(weights, hessian, settings.gptq), strict=True):
            found[path] = result
            back = kernels.int4_to_float32(result.weight.packed, result.weight.scale, x.shape[1])
            if settings.down_inputs == "quantized":
                learning.get_submodule(path).weight.data = torch.from_numpy(back).double()
            if settings.propagate == "quantized":
                going_on.get_submodule(path).weight.data = torch.from_numpy(back)
    return going_on, found


def nibbles(result: Calibrated) -> Any:
    return np.stack([(result.weight.packed.view(np.uint32) >> shift) & 15 for shift in range(0, 32, 4)])


@pytest.mark.parametrize("inputs", ["quantized", "original"])
@pytest.mark.parametrize("propagate", ["quantized", "original"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_weights_are_those_of_the_stages_by_hand(
    inputs: str, propagate: str, method: str, workers: Workers
) -> None:
    settings = replace(SETTINGS, down_inputs=inputs, propagate=propagate)
    toy, found = calibrate_toy(workers, wanted_of(TOY, method), settings)
    expected_toy, expected = by_hand(settings, method)
    assert list(found) == TOY
    for path in TOY:
        assert found[path].tokens == 70
        assert (nibbles(found[path]) != nibbles(expected[path])).mean() < 0.01
    with torch.no_grad():
        difference = (toy(TOY_INPUT) - expected_toy(TOY_INPUT)).abs().max()
        changed = (Toy()(TOY_INPUT) - toy(TOY_INPUT)).abs().max()
    assert float(difference) < 0.02 and (float(changed) > 0.05) == (propagate == "quantized")


def test_a_method_or_group_size_of_its_own_shares_the_stage(workers: Workers) -> None:
    plain = calibrate_toy(workers, wanted_of(TOY))[1]
    odd = [replace(one, treatment=Treatment("gptq", 64)) if one.path == "up" else one for one in wanted_of(TOY)]
    found = calibrate_toy(workers, odd)[1]
    assert found["up"].weight.scale.shape == (96, 1) and found["gate"].weight.scale.shape == (96, 2)
    assert np.array_equal(found["gate"].weight.packed, plain["gate"].weight.packed)


def test_both_methods_together_mean_gptq(workers: Workers) -> None:
    one, other = (
        calibrate_toy(workers, wanted_of(["down"], method))[1]["down"] for method in ("gptq", "gptq+awq")
    )
    assert np.array_equal(one.weight.packed, other.weight.packed) and one.form == other.form == "dense"


def test_what_is_finished_is_taken_over(workers: Workers) -> None:
    whole = calibrate_toy(workers, wanted_of(TOY))[1]
    rest = [
        replace(one, finished=whole[one.path].float32) if one.path in ("gate", "up") else one
        for one in wanted_of(TOY)
    ]
    toy, found = calibrate_toy(workers, rest)
    assert list(found) == ["down", "last"]
    for path in found:
        assert np.array_equal(found[path].weight.packed, whole[path].weight.packed)
    assert np.array_equal(toy.gate.weight.numpy(), whole["gate"].float32())


@pytest.mark.parametrize("count", [1, 4])
def test_threads_change_no_bit(count: int, workers: Workers) -> None:
    others = Workers(count)
    try:
        first, second = (calibrate_toy(w, wanted_of(TOY))[1] for w in (workers, others))
    finally:
        others.close()
    for path in TOY:
        assert np.array_equal(first[path].weight.packed, second[path].weight.packed)


@pytest.mark.parametrize(("path", "says"), [("unused", "0 times"), ("twice", "2 times")])
def test_odd_linears_are_refused(path: str, says: str, workers: Workers) -> None:
    with pytest.raises(UnsupportedError, match=f"calls this linear {says}") as caught:
        calibrate_toy(workers, wanted_of([path]))
    assert caught.value.where == f"toy.{path}"


def test_a_linear_behind_the_experts_is_refused(tmp_path: Path, workers: Workers) -> None:
    """A hook stands for a model that calls a linear after its experts."""
    copy = bf16_copy("qwen3_moe", tmp_path)

    def look(number: int, linears: Linears) -> None:
        layer = linears._layer
        layer.late = torch.nn.Linear(256, 32)

        def call_it(module: Any, args: Any, output: torch.Tensor) -> None:
            layer.late(output)

        layer.register_forward_hook(call_it)
        with pytest.raises(UnsupportedError, match="comes from the routed experts"):
            linears.stages(["late"])

    stream_layers(copy, SAMPLES[:2], workers, look, 1)


def test_a_layer_that_is_passed_again_has_its_own_weights(tmp_path: Path, workers: Workers) -> None:
    """An amendment leaves a layer as it was: nothing of its first pass may stay, not in attention either."""
    copy = bf16_copy("qwen3_moe", tmp_path)
    passes: list[int] = []

    def spoil(number: int, linears: Linears) -> None:
        passes.append(number)
        if passes == [0]:
            linears.replace("self_attn.o_proj", np.zeros_like(linears.weight("self_attn.o_proj")))

    again = stream_layers(copy, SAMPLES[:2], workers, spoil, 1, give_up=True)
    plain = stream_layers(copy, SAMPLES[:2], workers, lambda number, linears: None, 1)
    assert passes == [0, 0] and torch.equal(again[0], plain[0])
