"""Derived patterns: exact sets, engine names, and the check that refuses wrong ones."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import UnsupportedError
from quantkit.models.classify import find_family
from quantkit.plan.targets import Universe, matches

MODULES = [
    "lm_head", "model.embed_tokens", "vision_tower.blocks.0.wo", "vision_tower.blocks.1.wo",
    *(f"model.layers.{n}.self_attn.{p}" for n, p in product(range(12), ("q_proj", "o_proj"))),
    *(f"model.layers.{n}.mlp.gate" for n in range(1, 12)),
    *(f"model.layers.{n}.mlp.shared_experts.up_proj" for n in range(1, 12)),
    *(f"model.layers.{n}.mlp.experts.{e}.{p}" for n, e, p in
      product(range(1, 12), range(11), ("gate_proj", "up_proj", "down_proj"))),
]  # fmt: skip
CLASSIFIER = find_family({"model_type": "deepseek_v3", "num_hidden_layers": 11}, [f"{m}.weight" for m in MODULES])
ROLES = {m: CLASSIFIER.role_of(f"{m}.weight") for m in MODULES}
UNIVERSE = Universe(ROLES, CLASSIFIER.family)


@given(
    st.sets(st.sampled_from(MODULES), min_size=1, max_size=40),
    st.sampled_from(["", r"experts\.\d+\.up", "layers.3."]),
)
def test_patterns_match_exactly_the_set(chosen: set[str], also: str) -> None:
    members = chosen | {m for m in MODULES if also and re.search(also, m)}
    patterns = UNIVERSE.patterns(members)
    assert {m for m in MODULES if any(matches(p, m) for p in patterns)} == members
    UNIVERSE.check({"a": patterns}, dict.fromkeys(members, "a"))


def test_all_main_experts_are_one_pattern_without_shared_ones_and_mtp() -> None:
    members = [m for m, r in ROLES.items() if r.expert is not None and not r.is_mtp]
    (pattern,) = UNIVERSE.patterns(members)
    assert matches(pattern, "language_model.model.layers.10.mlp.experts.999.up_proj")
    for name in (
        "model.layers.11.mlp.experts.0.up_proj",
        "model.layers.1.mlp.shared_experts.up_proj",
        "model.layers.1.mlp.experts.0.up_proj.extra",
        "model.layers.110.mlp.experts.0.up_proj",
        "model.layers.1.mlp.experts.0.up_projx",
    ):
        assert not matches(pattern, name)


@pytest.mark.parametrize(
    "patterns, membership, says",
    [
        (("re:.*experts.*",), {}, "is matched by"),
        (("re:.*nothing$",), {}, "match nothing"),
        ((), {"lm_head": "a"}, "no pattern"),
    ],
)
def test_wrong_patterns_are_refused(patterns: tuple[str, ...], membership: dict[str, str], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        UNIVERSE.check({"a": patterns}, membership)
