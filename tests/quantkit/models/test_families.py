"""The family table against the published names, and what happens to names that fit no table."""

from __future__ import annotations

import time
from collections import defaultdict

import pytest

from quantkit.errors import UnsupportedError
from quantkit.models.classify import find_family
from quantkit.models.families import FAMILIES
from quantkit.models.role import Role
from tests import facts

# The tables' own words for a purpose -> ours.
ROLES = {
    "embed": Role.EMBEDDING, "head": Role.LM_HEAD, "norm": Role.NORM, "attn": Role.ATTENTION,
    "dense_mlp": Role.DENSE_MLP, "shared": Role.SHARED_EXPERT, "router": Role.ROUTER, "expert": Role.ROUTED_EXPERT,
    "indexer": Role.INDEXER, "mtp": Role.MTP, "mtp_embed": Role.MTP, "mtp_head": Role.MTP, "buffer": Role.OTHER,
    "vision": Role.VISION,
}  # fmt: skip
MTP_ONLY = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")


def expected_role(entry: dict, name: str) -> Role:
    # The tables file the norms of the MTP head under norm; ours go with the head.
    return Role.MTP if name.endswith(MTP_ONLY) else ROLES[entry["role"].removesuffix("_scale")]


@pytest.mark.parametrize("name", facts.names())
def test_every_published_tensor_has_the_role_the_table_gives_it(name: str) -> None:
    classifier = find_family(facts.facts(name)["config"], facts.tensors(name))
    assert classifier.warnings == ()
    bytes_of: dict[tuple[Role, bool], int] = defaultdict(int)
    tensors = facts.tensors(name)
    for entry, full in facts.entries(name):
        role = classifier.role_of(full)
        assert role.role is expected_role(entry, full), full
        assert role.is_mtp == (entry["kind"] == "mtp"), full
        assert full in (role.module, f"{role.module}.{role.part}")
        bytes_of[role.role, role.is_mtp] += tensors[full].nbytes
    sizes = facts.facts(name)["sizes"]
    experts = bytes_of[Role.ROUTED_EXPERT, False] + bytes_of[Role.ROUTED_EXPERT, True]
    assert experts == sizes["expert_bytes_as_stored"]
    assert sum(bytes_of.values()) == sizes["total_tensor_bytes_computed"]


def test_layer_expert_and_projection_are_read_from_the_name() -> None:
    classifier = find_family(facts.facts("glm-5.2-fp8")["config"], ["model.layers.3.mlp.experts.0.up_proj.weight"])
    role = classifier.role_of("model.layers.77.mlp.experts.255.down_proj.weight_scale_inv")
    assert (role.layer, role.expert, role.projection, role.part) == (77, 255, "down", "weight_scale_inv")
    assert classifier.role_of("model.layers.78.mlp.experts.1.gate_proj.weight").is_mtp
    shared = classifier.role_of("model.layers.3.mlp.shared_experts.up_proj.weight")
    assert (shared.role, shared.expert, shared.projection) == (Role.SHARED_EXPERT, None, "up")


def test_w_names_are_gate_up_and_down() -> None:
    name = "model.layers.0.block_sparse_moe.experts.{}.{}.weight"
    classifier = find_family({"model_type": "minimax_m2"}, [name.format(0, "w1")])
    kinds = {w: classifier.role_of(name.format(7, w)).projection for w in ("w1", "w2", "w3")}
    assert kinds == {"w1": "gate", "w2": "down", "w3": "up"}


@pytest.mark.parametrize(
    "name, role",
    [
        ("backbone.layers.4.ffn.experts.3.up_proj.weight", Role.ROUTED_EXPERT),
        ("backbone.layers.4.ffn.experts.3.w2.weight", Role.ROUTED_EXPERT),
        ("backbone.layers.4.ffn.shared_experts.up_proj.weight", Role.SHARED_EXPERT),
        ("backbone.layers.4.ffn.gate.weight", Role.ROUTER),
        ("backbone.layers.4.ffn.router.weight", Role.ROUTER),
        ("backbone.layers.4.ffn.gate_proj.weight", Role.DENSE_MLP),
        ("backbone.layers.4.attn.q_proj.weight", Role.ATTENTION),
        ("backbone.layers.4.input_layernorm.weight", Role.NORM),
        ("backbone.embed_tokens.weight", Role.EMBEDDING),
        ("lm_head.weight", Role.LM_HEAD),
        ("vision_tower.blocks.0.attn.qkv.weight", Role.VISION),
        ("something.else", Role.OTHER),
    ],
)
def test_unknown_family_works_by_the_usual_words_and_warns(name: str, role: Role) -> None:
    names = [f"backbone.layers.4.ffn.experts.{e}.{p}.weight" for e in range(2) for p in ("gate_proj", "up_proj")]
    classifier = find_family({"model_type": "novel_moe", "num_hidden_layers": 6}, [*names, name])
    assert classifier.role_of(name).role is role
    assert len(classifier.warnings) == 1 and "novel_moe" in classifier.warnings[0]


def test_known_model_type_with_foreign_names_falls_back_with_a_warning() -> None:
    classifier = find_family({"model_type": "mixtral"}, ["model.layers.0.mlp.experts.0.gate_proj.weight"])
    assert classifier.family.name == "generic"
    assert "mixtral" in classifier.warnings[0]


def test_dense_model_is_refused_and_the_message_says_what_was_looked_for() -> None:
    with pytest.raises(UnsupportedError) as caught:
        find_family({"model_type": "llama"}, ["model.layers.0.mlp.gate_proj.weight"])
    assert caught.value.exit_code == 3
    for word in ("llama", "experts.<n>", "gate_proj", "model.layers.0.mlp.gate_proj.weight"):
        assert word in str(caught.value)


def test_fused_experts_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.experts\.gate_up_proj.*fused"):
        find_family({"model_type": "qwen3_moe"}, ["model.layers.0.mlp.experts.gate_up_proj"])


def test_unknown_projection_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="fc1"):
        find_family({}, ["model.layers.0.mlp.experts.0.fc1.weight"])


def test_a_big_checkpoint_is_classified_in_time() -> None:
    names = list(facts.tensors("glm-5.2-fp8"))
    start = time.process_time()
    classifier = find_family(facts.facts("glm-5.2-fp8")["config"], names)
    roles = [classifier.role_of(name) for name in names]
    seconds = time.process_time() - start
    assert len(roles) == 118_629
    assert seconds < 3  # 0.6 on an idle core; the bound leaves room for a busy machine


def test_family_names_are_unique_and_model_types_select_one() -> None:
    names = [f.name for f in FAMILIES]
    types = [t for f in FAMILIES for t in f.model_types]
    assert len(set(names)) == len(names) and len(set(types)) == len(types)
    for family in FAMILIES:
        assert family.expert_paths[0] in "".join(pattern for _, pattern in family.rules)
