"""One expert against the same steps written out with loops over tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

import quantkit_kernels as kernels
from quantkit.calibration import GptqSettings, Hessian, fold_expert, gptq, round_by_importance
from quantkit.calibration.expert import Expert, ExpertSettings, calibrate_expert, facts
from quantkit.calibration.experts import CHUNK_TOKENS, PIECE_TOKENS, Inputs
from quantkit.recipe.treatment import Treatment

HIDDEN, INNER, EXPERTS = 128, 64, 3
GPTQ = dict.fromkeys(("gate", "up", "down"), Treatment("gptq", 32))


def ways(projections: Iterable[str], method: str = "gptq") -> dict[str, Treatment]:
    return dict.fromkeys(projections, Treatment(method, 32))


def gating(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def weights_of(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    return {p: rng.standard_normal(shape).astype(np.float32) * 0.1 for p, shape in shapes.items()}


def inputs_of(index: Sequence[Sequence[int]]) -> Inputs:
    generator = torch.Generator().manual_seed(len(index))
    states = torch.randn(len(index), HIDDEN, generator=generator)
    weight = torch.rand(len(index), len(index[0]), generator=generator) + 0.1
    return Inputs(states, torch.tensor(index), weight)


def tokens_of(inputs: Inputs, expert: int) -> list[tuple[int, float]]:
    found = []
    for token, row in enumerate(inputs.index.tolist()):
        for place, number in enumerate(row):
            if number == expert:
                found.append((token, float(inputs.weight[token, place])))
    return found


def test_gate_and_up_then_down_behind_them() -> None:
    inputs = inputs_of([[i % 3, (i + 1) % 3] for i in range(90)])
    weights, settings = weights_of(0), ExpertSettings(GptqSettings(group_size=32), min_tokens=10)
    found, outputs = calibrate_expert(weights, GPTQ, inputs.routed(1), inputs, gating, "layer.expert", settings)
    tokens = tokens_of(inputs, 1)
    x = torch.stack([inputs.states[t] for t, _ in tokens])
    counts = torch.tensor([w * w for _, w in tokens])
    entry = Hessian(HIDDEN, where="")
    entry.add(x, counts)
    gate, up = gptq([weights["gate"], weights["up"]], entry, settings.gptq)
    back = {n: torch.from_numpy(kernels.int4_to_float32(r.weight.packed, r.weight.scale, HIDDEN))
            for n, r in (("gate", gate), ("up", up))}  # fmt: skip
    z = torch.nn.functional.silu(x @ back["gate"].T) * (x @ back["up"].T)
    inner = Hessian(INNER, where="")
    inner.add(z, counts)
    (down,) = gptq([weights["down"]], inner, settings.gptq)
    for projection, expected in (("gate", gate), ("up", up), ("down", down)):
        assert np.array_equal(found[projection].weight.packed, expected.weight.packed), projection
        assert np.array_equal(found[projection].weight.scale, expected.weight.scale)
        assert found[projection].tokens == len(tokens) and not facts(found[projection], settings)["shrunk"]
    y = z @ torch.from_numpy(kernels.int4_to_float32(down.weight.packed, down.weight.scale, INNER)).T
    assert torch.allclose(outputs, y * torch.tensor([[w] for _, w in tokens]), atol=1e-5)


def test_original_weights_go_on_if_asked() -> None:
    inputs = inputs_of([[i % 3] for i in range(60)])
    weights, routed = weights_of(1), inputs.routed(2)
    settings = ExpertSettings(min_tokens=0, propagate="original")
    _, outputs = calibrate_expert(weights, {"down": GPTQ["down"]}, routed, inputs, gating, "", settings)
    assert torch.equal(outputs, routed.outputs(Expert(weights, gating)))


def test_what_is_not_chosen_stays() -> None:
    inputs = inputs_of([[i % 3] for i in range(60)])
    found, _ = calibrate_expert(
        weights_of(1), {"up": GPTQ["up"]}, inputs.routed(0), inputs, gating, "", ExpertSettings()
    )
    assert list(found) == ["up"]


def quantized_by(weight: np.ndarray, x: torch.Tensor, counts: torch.Tensor | None) -> kernels.Int4Weight:
    hessian = Hessian(weight.shape[1], where="")
    hessian.add(x, counts)
    return gptq([weight], hessian, GptqSettings(group_size=32))[0].weight


def same(a: kernels.Int4Weight, b: kernels.Int4Weight) -> bool:
    return a.packed.tobytes() == b.packed.tobytes() and a.scale.tobytes() == b.scale.tobytes()


def test_down_learns_behind_the_original_gate_and_up_if_asked() -> None:
    inputs = inputs_of([[i % 3, (i + 1) % 3] for i in range(90)])
    weights, found = weights_of(3), {}
    for kind in ("quantized", "original"):
        settings = ExpertSettings(min_tokens=0, down_inputs=kind)
        found[kind], _ = calibrate_expert(weights, GPTQ, inputs.routed(1), inputs, gating, "", settings)
    tokens = tokens_of(inputs, 1)
    x = torch.stack([inputs.states[t] for t, _ in tokens])
    z = torch.nn.functional.silu(x @ torch.from_numpy(weights["gate"]).T) * (x @ torch.from_numpy(weights["up"]).T)
    expected = quantized_by(weights["down"], z, torch.tensor([w * w for _, w in tokens]))
    assert same(found["original"]["down"].weight, expected)
    assert not same(found["quantized"]["down"].weight, expected)
    assert same(found["quantized"]["up"].weight, found["original"]["up"].weight)


@pytest.mark.parametrize("method", ["awq", "gptq+awq"])
@pytest.mark.parametrize("kept", [[], ["gate"]])
def test_folding_methods_fold_first(method: str, kept: list[str]) -> None:
    """The steps one by one: the fold by down's original inputs, gate and up behind it, down behind these."""
    inputs = inputs_of([[i % 3, (i + 1) % 3] for i in range(150)])
    weights, settings = weights_of(7), ExpertSettings(GptqSettings(), min_tokens=0)
    weights["up"] *= np.exp(np.random.default_rng(1).normal(0, 1.5, (INNER, 1))).astype(np.float32)
    chosen = [p for p in weights if p not in kept]
    found, outputs = calibrate_expert(
        weights, ways(chosen, method), inputs.routed(1), inputs, gating, "", settings
    )
    tokens = tokens_of(inputs, 1)
    x, counts = torch.stack([inputs.states[t] for t, _ in tokens]), torch.tensor([w * w for _, w in tokens])

    def behind(gate: np.ndarray, up: np.ndarray) -> Hessian:
        hessian = Hessian(INNER, where="")
        hessian.add(torch.nn.functional.silu(x @ torch.from_numpy(gate).T) * (x @ torch.from_numpy(up).T), counts)
        return hessian

    fold = fold_expert(weights["up"], weights["down"], behind(weights["gate"], weights["up"]), settings.gptq)
    assert fold.alpha > 0
    entry = Hessian(HIDDEN, where="")
    entry.add(x, counts)
    quantizer = gptq if method == "gptq+awq" else round_by_importance
    first = [p for p in ("gate", "up") if p in chosen]
    results = dict(
        zip(first, quantizer([{**weights, "up": fold.up}[p] for p in first], entry, settings.gptq), strict=True)
    )
    back = {p: kernels.int4_to_float32(r.weight.packed, r.weight.scale, HIDDEN) for p, r in results.items()}
    gate = back.get("gate", weights["gate"])
    (results["down"],) = quantizer([fold.down], behind(gate, back["up"]), settings.gptq)
    assert found.keys() == results.keys()
    for projection, result in results.items():
        assert same(found[projection].weight, result.weight), projection
    for projection in ("up", "down"):
        assert np.array_equal(found[projection].fold_scale, fold.scale)
        assert facts(found[projection], settings)["fold_alpha"] == fold.alpha
    assert "gate" not in found or found["gate"].fold_scale is None
    down = kernels.int4_to_float32(results["down"].weight.packed, results["down"].weight.scale, INNER)
    y = Expert({"gate": gate, "up": back["up"], "down": down}, gating)(x)
    assert torch.allclose(outputs, y * torch.tensor([[w] for _, w in tokens]), atol=1e-5)


def test_original_outputs_go_on_unfolded() -> None:
    inputs = inputs_of([[i % 3] for i in range(60)])
    weights, routed, settings = weights_of(8), inputs.routed(2), ExpertSettings(min_tokens=0, propagate="original")
    _, outputs = calibrate_expert(weights, ways(weights, "awq"), routed, inputs, gating, "", settings)
    assert torch.equal(outputs, routed.outputs(Expert(weights, gating)))


def test_weight_error_is_that_of_the_weight_alone() -> None:
    """By its definition; without the floor it would say what the sweep cost the weight, and it still does."""
    inputs = inputs_of([[i % 3] for i in range(200)])
    weights, settings = weights_of(9), ExpertSettings(GptqSettings(shrink=False), min_tokens=0)
    found, _ = calibrate_expert(weights, ways(weights), inputs.routed(0), inputs, gating, "", settings)
    for projection, result in found.items():
        columns = weights[projection].shape[1]
        rtn = kernels.float_to_int4(weights[projection], 32, "rtn")
        ours, theirs = (
            float(np.square(weights[projection].astype(np.float64) - back).sum())
            for back in (kernels.int4_to_float32(q.packed, q.scale, columns) for q in (result.weight, rtn))
        )
        assert facts(result, settings)["weight_error_to_rtn"] == pytest.approx(ours / theirs, rel=1e-5)
        assert ours > theirs


@pytest.mark.parametrize("routed", [0, 1, 300])
def test_every_expert_learns_from_all_tokens_if_asked(routed: int) -> None:
    """Whatever is routed to it: the same bits, outputs for its own tokens, no shrinking."""
    inputs = inputs_of([[1 if i < routed else 0] for i in range(300)])
    weights, settings = weights_of(4), ExpertSettings(min_tokens=10_000, route_all=True)
    found, outputs = calibrate_expert(weights, GPTQ, inputs.routed(1), inputs, gating, "", settings)
    entry = quantized_by(np.concatenate([weights["gate"], weights["up"]]), inputs.states, None)
    both = (np.concatenate([getattr(found[p].weight, k) for p in ("gate", "up")]) for k in ("packed", "scale"))
    assert all(
        np.array_equal(ours, theirs) for ours, theirs in zip(both, (entry.packed, entry.scale), strict=True)
    )
    back = {
        p: kernels.int4_to_float32(found[p].weight.packed, found[p].weight.scale, HIDDEN) for p in ("gate", "up")
    }
    z = Expert({**back, "down": weights["down"]}, gating).inner(inputs.states)
    assert same(found["down"].weight, quantized_by(weights["down"], z, None))
    assert outputs.shape == (routed, HIDDEN)
    for said in (facts(result, settings) for result in found.values()):
        assert (said["tokens"], said["routed_tokens"], said["shrunk"]) == (300, routed, False)


def test_gate_and_up_in_groups_of_different_sizes() -> None:
    """As each of them by itself, from the Hessian that they share; down by its own size behind both."""
    inputs = inputs_of([[i % 3] for i in range(90)])
    weights, routed, settings = weights_of(3), inputs.routed(1), ExpertSettings(min_tokens=0)
    chosen = {"gate": Treatment("gptq", 32), "up": Treatment("gptq", 128), "down": Treatment("gptq", 64)}
    found, _ = calibrate_expert(weights, chosen, routed, inputs, gating, "", settings)
    assert {p: r.weight.scale.shape[1] for p, r in found.items()} == {"gate": 4, "up": 1, "down": 1}
    back = {}
    for projection in ("gate", "up"):
        alone, _ = calibrate_expert(
            weights, {projection: chosen[projection]}, routed, inputs, gating, "", settings
        )
        assert np.array_equal(found[projection].weight.packed, alone[projection].weight.packed)
        made = found[projection].weight
        back[projection] = kernels.int4_to_float32(made.packed, made.scale, HIDDEN)
    behind, _ = calibrate_expert(
        weights, {"down": chosen["down"]}, routed, inputs, gating, "", settings, rounded=back
    )
    assert np.array_equal(found["down"].weight.packed, behind["down"].weight.packed)
    unlike, _ = calibrate_expert(weights, {"down": chosen["down"]}, routed, inputs, gating, "", settings)
    assert not np.array_equal(found["down"].weight.packed, unlike["down"].weight.packed)


@pytest.mark.parametrize("propagate", ["quantized", "original"])
def test_what_is_rounded_elsewhere_goes_on_as_it_is_there(propagate: str) -> None:
    inputs = inputs_of([[i % 3] for i in range(60)])
    weights, routed = weights_of(1), inputs.routed(2)
    rounded = {"up": kernels.int4_to_float32(*_parts(weights["up"]), HIDDEN)}
    settings = ExpertSettings(min_tokens=0, propagate=propagate)
    found, outputs = calibrate_expert(
        weights, {"down": GPTQ["down"]}, routed, inputs, gating, "", settings, rounded=rounded
    )
    down = kernels.int4_to_float32(found["down"].weight.packed, found["down"].weight.scale, INNER)
    goes_on = {**weights, **rounded, "down": down} if propagate == "quantized" else weights
    assert torch.equal(outputs, routed.outputs(Expert(goes_on, gating)))


def _parts(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    made = kernels.float_to_int4(weight, 32, "rtn")
    return made.packed, made.scale


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_starved_expert_learns_from_the_average_of_the_layer(tokens: int) -> None:
    """Nearer to what the layer's other tokens want than plain rounding is, and said to be shrunk."""
    inputs = inputs_of([[1 if i < tokens else 0] for i in range(300)])
    weights, settings = weights_of(2), ExpertSettings(min_tokens=64)
    found, outputs = calibrate_expert(weights, GPTQ, inputs.routed(1), inputs, gating, "", settings)
    assert outputs.shape == (tokens, HIDDEN)
    x = inputs.states
    for projection in ("gate", "up"):
        result = found[projection]
        assert facts(result, settings)["shrunk"] and result.tokens == tokens and result.form != "none"
        rounded = kernels.float_to_int4(weights[projection], 32, "rtn")
        errors = []
        for version in (result.weight, rounded):
            error = weights[projection] - kernels.int4_to_float32(version.packed, version.scale, HIDDEN)
            errors.append(float((x @ torch.from_numpy(error).T).square().sum()))
        assert errors[0] < errors[1]


def test_routed_tokens_come_in_order_and_in_chunks() -> None:
    inputs = inputs_of([[i % 2] for i in range(2 * CHUNK_TOKENS + 6)])
    routed = inputs.routed(1)
    assert torch.equal(routed.tokens, torch.arange(CHUNK_TOKENS + 3) * 2 + 1)
    assert [len(states) for states, _ in routed.chunks()] == [CHUNK_TOKENS, 3]
    assert torch.equal(torch.cat([states for states, _ in routed.chunks()]), inputs.states[routed.tokens])
    trims: list[int] = []
    for one in (
        replace(inputs, trim=lambda: trims.append(1)).routed(1),
        replace(routed, trim=lambda: trims.append(1)),
    ):
        trims.clear()
        list(one.chunks())
        assert len(trims) == CHUNK_TOKENS // PIECE_TOKENS + 1
