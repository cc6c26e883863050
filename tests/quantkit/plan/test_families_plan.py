"""Plans of small checkpoints of every family: accounting, views, files, configs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.models.role import Role
from quantkit.plan import Plan, build_plan
from quantkit.plan.fate import Action, Op
from tests.builders import FAMILIES, write_moe
from tests.recipes import data_free_recipe


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("families")
    made = {}
    for family in FAMILIES:
        for storage in ("published", "bf16"):
            options = {} if storage == "published" else {"storage": storage}
            made[family, storage] = write_moe(folder / f"{family}-{storage}", family, **options)
    return made


def check_accounting(plan: Plan, checkpoint: Checkpoint) -> None:
    """Every source tensor has one fate; jobs and fates agree; every view is either the source or fully written."""
    assert list(plan.fates) == list(checkpoint.tensors)
    for view, shards in (("decode", plan.decode), ("prefill", plan.prefill)):
        if not shards:
            assert plan.decode_is_source if view == "decode" else plan.prefill_is_source
            continue
        read = [name for job in plan.jobs(view) for name in job.sources]
        assert sorted(read) == sorted(checkpoint.tensors), view
        written = [t.name for job in plan.jobs(view) for t in job.outputs]
        assert len(set(written)) == len(written)
        named = {n for f in plan.fates.values() for n in (f.decode_names if view == "decode" else f.prefill_names)}
        assert named == set(written)
        assert len({s.file for s in shards}) == len(shards)
        assert all(s.view == view for s in shards)
        for job in plan.jobs(view):
            if job.op is Op.COPY:
                info = checkpoint.tensors[job.sources[0]]
                assert [(t.dtype, t.shape) for t in job.outputs] == [(info.dtype, info.shape)]


@pytest.mark.parametrize("storage", ["published", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_accounted_for(sources: dict, family: str, storage: str) -> None:
    with open_checkpoint(sources[family, storage]) as checkpoint:
        derived = storage == "bf16" or family == "kimi_k25"
        plan = build_plan(checkpoint, data_free_recipe(make_fp8=derived))
        check_accounting(plan, checkpoint)
        assert plan.family == family and plan.warnings == checkpoint.warnings
        assert plan.prefill_origin == ("derived" if derived else "publisher")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_accounting_holds_for_any_options(sources: dict, data: st.DataObject) -> None:
    family = data.draw(st.sampled_from([f for f in FAMILIES if f != "kimi_k25"]))
    storage = data.draw(st.sampled_from(["published", "bf16"]))
    options = {
        "group_size": data.draw(st.sampled_from([32, 64, 128])),
        "linears": data.draw(st.sampled_from(["routed", "all-mlp", "all"])),
        "rest": data.draw(st.sampled_from(["fp8", "bf16"])),
        "mtp": data.draw(st.sampled_from(["keep", "quantize"])),
        "layers": data.draw(st.sampled_from([None, "1"])),
        "keep": data.draw(st.sampled_from([(), (r"experts\.2\.",), (r"experts\.\d+\.(down_proj|w2)",)])),
        "max_shard_size": data.draw(st.sampled_from(["10GB", "100KB", "1B"])),
        "make_fp8": storage == "bf16",
    }
    with open_checkpoint(sources[family, storage]) as checkpoint:
        plan = build_plan(checkpoint, data_free_recipe(**options))
        check_accounting(plan, checkpoint)
        assert plan.plan_id == build_plan(checkpoint, data_free_recipe(**options)).plan_id
        for fate in plan.fates.values():
            if fate.decode is Action.QUANTIZE:
                assert fate.role in (Role.ROUTED_EXPERT, Role.SHARED_EXPERT, Role.DENSE_MLP, Role.ATTENTION)
                assert "kv_b_proj" not in fate.name
                assert options["mtp"] == "quantize" or not fate.is_mtp


def test_fp8_scales_are_renamed_in_the_decode_view_only(sources: dict) -> None:
    with open_checkpoint(sources["glm_moe_dsa", "published"]) as checkpoint:
        plan = build_plan(checkpoint, data_free_recipe())
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    fate = plan.fates[name]
    assert (fate.decode, fate.decode_names) == (Action.RENAME, ("model.layers.0.self_attn.o_proj.weight_scale",))
    assert (fate.prefill, fate.prefill_names) == (Action.KEEP, (name,))


def test_bf16_source_derives_both_views_with_the_same_fp8_bytes(sources: dict) -> None:
    with open_checkpoint(sources["glm_moe_dsa", "bf16"]) as checkpoint:
        plan = build_plan(checkpoint, data_free_recipe(make_fp8=True))
    name = "model.layers.0.self_attn.o_proj.weight"
    decode = next(j for j in plan.jobs("decode") if j.sources == (name,))
    prefill = next(j for j in plan.jobs("prefill") if j.sources == (name,))
    assert decode.op is prefill.op is Op.TO_FP8
    assert [(t.dtype, t.shape) for t in decode.outputs] == [(t.dtype, t.shape) for t in prefill.outputs]
    assert [t.name.rpartition(".")[2] for t in decode.outputs] == ["weight", "weight_scale"]
    assert [t.name.rpartition(".")[2] for t in prefill.outputs] == ["weight", "weight_scale_inv"]
    expert = "model.layers.1.mlp.experts.0.up_proj.weight"
    assert next(j for j in plan.jobs("decode") if j.sources == (expert,)).op is Op.TO_INT4
    assert plan.prefill_config is not None
    kept = plan.prefill_config["quantization_config"]["modules_to_not_convert"]
    for module in ("lm_head", "model.embed_tokens", "model.layers.1.mlp.gate", "model.layers.2.eh_proj"):
        assert module in kept
    assert "model.layers.1.self_attn.indexer.weights_proj" in kept
    assert "model.layers.1.self_attn.indexer.wk" not in kept


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("glm4_moe", "kimi_k25")])
def test_derived_fp8_is_the_publisher_s_selection(sources: dict, family: str) -> None:
    """FP8 made from BF16 has the tensors, dtypes and shapes of the published FP8 layout (scales in F32)."""
    with open_checkpoint(sources[family, "published"]) as fp8:
        expected = {n: ("F32" if n.endswith("scale_inv") else t.dtype, t.shape) for n, t in fp8.tensors.items()}
    with open_checkpoint(sources[family, "bf16"]) as checkpoint:
        plan = build_plan(checkpoint, data_free_recipe(make_fp8=True))
    made = {t.name: (t.dtype, t.shape) for job in plan.jobs("prefill") for t in job.outputs}
    assert made == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"rest": "bf16"}, {"linears": "all"}, {"layers": "1"}], ids=str)
def test_compressed_tensors_accepts_the_config(sources: dict, family: str, options: dict) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    storage = "bf16" if family == "kimi_k25" else "published"
    with open_checkpoint(sources[family, storage]) as checkpoint:
        plan = build_plan(checkpoint, data_free_recipe(make_fp8=storage == "bf16", **options))
    raw = plan.decode_config["quantization_config"]
    config = QuantizationConfig.model_validate({k: v for k, v in raw.items() if k != "version"})
    formats = [group.format for group in config.config_groups.values()]
    assert formats[0] == "pack-quantized"
    assert raw["format"] == ("mixed-precision" if len(formats) > 1 else "pack-quantized")
    if options.get("rest") == "bf16":
        assert len(formats) == 1
    if options in ({}, {"layers": "1"}):
        assert formats[1:] == ["float-quantized"] or family == "mixtral"
    assert not {"scale_dtype", "zp_dtype"} & set(str(raw).replace("'", " ").split())
