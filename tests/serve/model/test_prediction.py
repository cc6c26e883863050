"""The multi-token-prediction layer against transformers' decoder layer behind the report's formula, in float32;
what is loaded for it; the runner's proposals on the kernels.

``tests.quantkit.calibration.test_mtp`` writes the formula in the open and runs transformers' layers; ours reads
the same plain copy of the checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import quantkit
from quantkit.errors import SourceError, UsageError
from quantkit_serve.batch import Batch, Proposer
from quantkit_serve.model.prediction import PredictionLayer
from quantkit_serve.model.runner import ModelRunner
from quantkit_serve.phase import Phase
from tests.builders import f32, moe, write_checkpoint, write_moe
from tests.quantkit.calibration.test_mtp import entry_by_hand, loaded_with, plain_tensors, rms, with_predictions
from tests.serve.model.oracle import PAGE, runner, step, tokens
from tests.serve.model.tiny import CASES, checkpoint

MTP: dict[str, Any] = {"speculative": "mtp"}
FAMILIES = ("glm_moe_dsa", "deepseek_v3", "deepseek_v32", "glm4_moe")
IDS = tokens(5, 82)  # longer than index_topk


class Oracle:
    """transformers' model with the prediction layer as its last, whose input is exchanged."""

    def __init__(self, copy: Path, config: dict[str, Any]) -> None:
        self._decoder = loaded_with(copy, 1).get_decoder()
        self._number, self._config, self._tensors = config["num_hidden_layers"], config, plain_tensors(copy)

    def hidden(self, ids: list[int]) -> Tensor:
        """What the last layer but the prediction layer gives, ``[T, H]``."""
        return self._run(ids, self._number - 1)

    def entry(self, hidden: Tensor, followers: list[int]) -> Tensor:
        """``[T, H]``, into the layer."""
        found = entry_by_hand(
            self._tensors, self._config, self._number, hidden[None], torch.tensor([followers]), "model.norm.weight"
        )
        return found[0]

    def further_entry(self, hidden: Tensor, follower: int) -> Tensor:
        """``[1, H]``, from what the layer itself gave, ``[H]``."""
        found = entry_by_hand(
            self._tensors, self._config, self._number, hidden[None, None], torch.tensor([[follower]]),
            f"model.layers.{self._number}.shared_head.norm.weight",
        )  # fmt: skip
        return found[0]

    def layer(self, entry: Tensor) -> Tensor:
        """What the prediction layer gives, ``[T, H]``."""
        return self._run([0] * len(entry), self._number, entry)

    def logits(self, hidden: Tensor) -> Tensor:
        at = f"model.layers.{self._number}.shared_head"
        head = self._tensors.get(f"{at}.head.weight", self._tensors["lm_head.weight"])
        return rms(hidden, self._tensors[f"{at}.norm.weight"], self._config["rms_norm_eps"]) @ head.T

    def _run(self, ids: list[int], number: int, entry: Tensor | None = None) -> Tensor:
        seen: list[Tensor] = []
        layer = self._decoder.layers[number]
        hooks = [
            layer.register_forward_hook(lambda m, a, out: seen.append(out[0] if isinstance(out, tuple) else out))
        ]
        if entry is not None:
            hooks.append(layer.register_forward_pre_hook(lambda m, a: (entry[None], *a[1:])))
        with torch.no_grad():
            self._decoder(torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        return seen[0][0]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Logits of the prediction layer, as they are made."""
    found: list[Tensor] = []
    plain = PredictionLayer.logits

    def logits(self: PredictionLayer, hidden: Tensor) -> Tensor:
        found.append(plain(self, hidden))
        return found[-1]

    monkeypatch.setattr(PredictionLayer, "logits", logits)
    return found


def propose(
    found: ModelRunner, runs: list[tuple[list[int], int, list[int]]], counts: list[int] | None = None,
    phase: Phase = Phase.PREFILL,
) -> list[list[int]]:  # fmt: skip
    """A step over runs of (token ids, the last of which only follows, position of the first, pages)."""
    found.run(step(phase, [(ids[:-1], at, pages) for ids, at, pages in runs]))
    known = step(Phase.DECODE, [(ids[1:], at, pages) for ids, at, pages in runs], last_only=True)
    rows = np.arange(len(known.token_ids))
    return found.propose(known, rows, np.array(counts or [1] * len(runs)))


@pytest.mark.parametrize("family", FAMILIES)
def test_proposals_are_those_of_transformers(family: str, tmp_path: Path, seen: list[Tensor]) -> None:
    copy = with_predictions(checkpoint(tmp_path / "source", CASES[family]), tmp_path)
    ours = runner(copy, **MTP)
    theirs = Oracle(copy, ours_config(copy))
    pages = list(range(-(-len(IDS) // PAGE) + 1))
    for start, end in ((0, 17), (17, 64), (64, 65)):  # the first 65 tokens, and those that follow
        (found,) = propose(ours, [(IDS[start : end + 1], start, pages)])
        entry = theirs.entry(theirs.hidden(IDS[:end]), IDS[1 : end + 1])
        expected = theirs.logits(theirs.layer(entry)[-1:])
        assert float((seen[-1] - expected).abs().max() / expected.abs().max()) < 2e-5
        assert found == [int(expected.argmax())]


@pytest.mark.parametrize("family", ["glm_moe_dsa", "glm4_moe"])
def test_the_layer_applied_again(family: str, tmp_path: Path, seen: list[Tensor]) -> None:
    copy = with_predictions(checkpoint(tmp_path / "source", CASES[family]), tmp_path)
    ours = runner(copy, **MTP)
    theirs = Oracle(copy, ours_config(copy))
    long, short = IDS[:81], tokens(6, 20)
    found = propose(ours, [(long, 0, [0, 1, 2, 3, 4, 5]), (short, 0, [6, 7])], [3, 2])
    assert [len(one) for one in found] == [3, 2]
    for row, ids in enumerate((long, short)):
        entry = theirs.entry(theirs.hidden(ids[:-1]), ids[1:])
        for applied, token in enumerate(found[row]):
            out = theirs.layer(entry)[-1]
            expected = theirs.logits(out[None])
            logits = seen[applied][row if len(seen[applied]) > 1 else 0][None]
            assert float((logits - expected).abs().max() / expected.abs().max()) < 2e-5
            assert token == int(expected.argmax())
            entry = torch.cat([entry, theirs.further_entry(out, token)])


def ours_config(copy: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((copy / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("case", "kv_dtype"),
    [("glm_moe_dsa", "fp8"), ("deepseek_v3", "bf16"), ("glm4_moe, groups, no norms", "fp8")],
)
def test_on_the_kernels_neither_chunks_nor_company_matter(
    case: str, kv_dtype: str, tmp_path: Path, seen: list[Tensor]
) -> None:
    found = runner(
        checkpoint(tmp_path / "checkpoint", CASES[case]), compute="bfloat16", cache={"kv_dtype": kv_dtype}, **MTP
    )
    ids, other, pages = tokens(1, 40), tokens(2, 21), [0, 1, 2, 3]
    whole = propose(found, [(ids, 0, pages)], [3])
    expected = list(seen)
    seen.clear()
    for start, end in ((0, 16), (16, 39)):
        parts = propose(found, [(ids[start : end + 1], start, [4, 5, 6, 7])], [3])
    assert parts == whole
    assert all(torch.equal(a, b) for a, b in zip(seen[-3:], expected, strict=True))
    seen.clear()
    crowd = propose(found, [(other, 0, [8, 9]), (ids, 0, [10, 11, 12, 13])], [1, 3])
    assert crowd[1] == whole[0]
    assert all(torch.equal(a[-1], b[0]) for a, b in zip(seen, expected, strict=True))


def test_only_then_it_is_loaded_and_counted(tmp_path: Path) -> None:
    path = write_moe(tmp_path / "source", "glm_moe_dsa")
    without, one = runner(path), runner(path, **MTP)
    assert isinstance(one, Proposer)
    assert sum(one.facts.memory.values()) > sum(without.facts.memory.values())
    assert one.facts.memory["shared"] == without.facts.memory["shared"]
    assert one.facts.page_bytes > without.facts.page_bytes
    assert one.facts.kv_format_id != without.facts.kv_format_id
    with pytest.raises(ValueError, match="prediction layer"):
        without.propose(step(Phase.DECODE, [([1], 0, [0])]), np.array([0]), np.array([1]))


def test_of_two_views_the_decode_view_has_it(tmp_path: Path) -> None:
    """Its experts are INT4 there and FP8 in the other one, which is not loaded."""
    target = tmp_path / "artifact"
    source = write_moe(tmp_path / "source", "glm_moe_dsa")
    quantkit.convert(quantkit.plan(source, method="rtn", group_size=32, mtp="quantize"), target)
    cache = {"kv_dtype": "f32"}
    memory = {
        (weights, speculative): runner(target, weights=weights, speculative=speculative, cache=cache).facts.memory
        for weights in ("dual", "int4")
        for speculative in ("off", "mtp")
    }
    more = {w: {k: memory[w, "mtp"][k] - memory[w, "off"][k] for k in memory[w, "off"]} for w in ("dual", "int4")}
    assert more["dual"]["prefill"] == more["dual"]["shared"] == 0
    assert more["dual"] == more["int4"]
    both = [runner(target, weights=weights, cache=cache, **MTP) for weights in ("dual", "int4")]
    runs: list[tuple[list[int], int, list[int]]] = [(tokens(3, 30), 0, [0, 1, 2])]
    assert propose(both[0], runs, phase=Phase.DECODE) == propose(both[1], runs, phase=Phase.DECODE)


@pytest.mark.parametrize("family", ["qwen3_moe", "kimi_k2"])
def test_a_model_without_one_is_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no multi-token-prediction layer"):
        runner(write_moe(tmp_path / "source", family), **MTP)


def test_a_tensor_of_the_layer_without_a_place_is_refused(tmp_path: Path) -> None:
    tensors, config = moe("deepseek_v3")
    stranger = {"model.layers.2.self_attn.sinks.weight": f32(np.ones(4, np.float32))}
    path = write_checkpoint(tmp_path / "source", tensors | stranger, config)
    runner(path)
    with pytest.raises(SourceError, match="sinks"):
        runner(path, **MTP)


def test_a_batch_is_not_changed(tmp_path: Path) -> None:
    found = runner(write_moe(tmp_path / "source", "deepseek_v3"), **MTP)
    found.run(step(Phase.PREFILL, [([1, 2, 3], 0, [0])]))
    known = step(Phase.DECODE, [([2, 3, 4], 0, [0])], last_only=True)
    before = replace(known, **{name: value.copy() for name, value in vars(known).items() if name != "phase"})
    found.propose(known, np.arange(3), np.array([4]))
    assert all(np.array_equal(getattr(known, n), getattr(before, n)) for n in vars(known) if n != "phase")
    assert isinstance(known, Batch)
