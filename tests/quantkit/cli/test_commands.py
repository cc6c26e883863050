"""The commands end to end, on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.builders import write_moe

from .conftest import Run, process

EXPERT = "model.layers.3.mlp.experts.0.up_proj"


def document(run: Run, *arguments: str | Path, code: int = 0) -> Any:
    """The one JSON document that a command prints with --json."""
    result = run(*arguments, "--json")
    assert result.code == code, result.err
    return json.loads(result.out)


def test_convert_verify_inspect_diff_as_processes(tmp_path: Path) -> None:
    """The way through the tool that a user takes, in real processes."""
    made = process("convert", "tiny-glm", "--w4", "--method", "rtn", "-j", "1", cwd=tmp_path)
    assert made.code == 0, made.err
    assert made.out.splitlines()[0] == str(tmp_path / "tiny-glm-w4-g32")
    assert "converting tiny-glm into tiny-glm-w4-g32" in made.err
    again = process("convert", "tiny-glm", "--method", "rtn", "--json", cwd=tmp_path)
    assert json.loads(again.out)["was_complete"] is True and "complete already" in again.err
    other = process("convert", "tiny-glm", "--method", "mse", "-o", "tiny-glm-w4-g32", cwd=tmp_path)
    assert (other.code, other.out) == (2, "") and "another plan" in other.err
    seen = process("verify", "tiny-glm-w4-g32", "--quick", cwd=tmp_path)
    assert seen.code == 0 and "verified as far as asked" in seen.out
    shown = process("inspect", "tiny-glm-w4-g32", cwd=tmp_path)
    assert shown.code == 0 and "dual-precision artifact" in shown.out


def test_verify_finds_a_changed_byte(run: Run, tmp_path: Path) -> None:
    import quantkit

    source = write_moe(tmp_path / "source", "qwen3_moe")
    quantkit.convert(quantkit.plan(source, method="rtn", place="copy"), tmp_path / "w4").close()
    assert document(run, "verify", tmp_path / "w4", "--against", source)["ok"] is True
    shard = max((tmp_path / "w4" / "decode").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    found = document(run, "verify", tmp_path / "w4", code=1)
    assert found["ok"] is False and "error" not in found
    result = run("verify", tmp_path / "w4")
    assert result.code == 1 and "FAILED" in result.out and shard.name in result.out


def test_inspect_checkpoint(run: Run) -> None:
    found = document(run, "inspect", "tiny-glm")
    assert (found["what"], found["family"], found["layers"], found["mtp_layers"], found["experts"]) == (
        "checkpoint", "glm_moe_dsa", 6, 1, 16,
    )  # fmt: skip
    for key in ("by_role", "by_dtype", "by_storage"):
        assert sum(s["nbytes"] for s in found[key]) == found["nbytes"]
        assert sum(s["tensors"] for s in found[key]) == found["tensors"]
    text = run("inspect", "tiny-glm").out
    assert "routed_expert" in text and "F8_E4M3" in text


def test_inspect_artifact_and_its_views(run: Run, artifact: Path) -> None:
    found = document(run, "inspect", artifact)
    assert found["what"] == "artifact" and set(found["views"]) == {"prefill", "decode"}
    assert {v["pair_id"] for v in found["views"].values()} == {found["pair_id"]}
    assert document(run, "inspect", artifact / "decode")["what"] == "decode view"
    assert "dual-precision artifact" in run("inspect", artifact).out


@pytest.mark.parametrize("name", [EXPERT, f"{EXPERT}.weight"])
def test_inspect_tensor(run: Run, name: str) -> None:
    found = document(run, "inspect", "tiny-glm", "--tensor", name)
    assert (found["name"], found["storage"], found["count"]) == (EXPERT, "fp8-block", 128 * 256)
    assert sum(found["histogram"]) == found["count"]
    assert EXPERT in run("inspect", "tiny-glm", "--tensor", name).out


def test_inspect_tensor_of_an_artifact_means_its_decode_view(run: Run, artifact: Path) -> None:
    assert document(run, "inspect", artifact, "--tensor", EXPERT)["storage"] == "int4-group"


def test_diff(run: Run, artifact: Path) -> None:
    found = document(run, "diff", "tiny-glm", artifact)
    assert (found["changed"], found["added"], found["removed"]) == (240, 0, 0)
    assert all(0.05 < c["relative_error"] < 0.2 and ".experts." in c["name"] for c in found["changes"])
    assert document(run, "diff", "tiny-glm", artifact / "prefill")["same"] is True
    result = run("diff", "tiny-glm", artifact)
    assert result.code == 0 and "200 more" in result.out
    assert "more" not in run("diff", "tiny-glm", artifact, "-v").out
    assert document(run, "diff", "tiny-glm", artifact, "--quick")["unread"] > 0


def test_recipes(run: Run) -> None:
    names = [r["name"] for r in document(run, "recipes")]
    assert {"glm-5.2", "tiny-glm"} <= set(names)
    assert all(name in run("recipes").out for name in names)
    assert document(run, "recipes", "show", "tiny-glm")["decode"]["group_size"] == 32
    assert json.loads(run("recipes", "schema").out)["additionalProperties"] is False


def test_a_shown_recipe_can_be_used(run: Run, tmp_path: Path) -> None:
    from quantkit import api

    file = tmp_path / "mine.yaml"
    file.write_text(run("recipes", "show", "tiny-qwen3").out)
    assert api.load_recipe(str(file)) == api.load_recipe("tiny-qwen3")
    assert document(run, "convert", file, "--dry-run")["source"]["label"] == "tiny-qwen3"


def test_env(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = document(run, "env")
    assert found["packages"]["torch"] and found["memory"]["total_bytes"] > 0 and found["hub"]["token"] is True
    text = run("env").out
    assert "kernels" in text and "hf_secret" not in text + json.dumps(found)


def test_env_shows_every_backend_and_why_one_is_off(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit_kernels.backends.why_not_triton", lambda: "there is no such card")
    backends = document(run, "env")["kernels"]["backends"]
    assert list(backends) == ["torch", "cpu", "triton"]
    assert backends["torch"]["why_not"] is None and backends["torch"]["version"]
    assert backends["cpu"]["why_not"] or backends["cpu"]["level"] in backends["cpu"]["levels"]
    assert "triton   off: there is no such card" in run("env").out


def test_env_tells_of_kernels_that_do_not_load(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import quantkit_kernels

    def broken() -> dict[str, Any]:
        raise OSError("libquantkit_kernels.so: wrong ELF class")

    monkeypatch.setattr(quantkit_kernels, "describe", broken)
    assert "wrong ELF class" in document(run, "env")["kernels"]["problem"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(run: Run, shell: str) -> None:
    assert "_QUANTKIT_COMPLETE" in run("completion", shell).out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("quantkit ver", "plain,verify"),
        ("quantkit plan tiny-q", "plain,tiny-qwen3"),
        ("quantkit convert --recipe glm-5.2", "plain,glm-5.2"),
        ("quantkit convert --prefill ref", "plain,reference"),
    ],
)
def test_completion_completes(words: str, expected: str) -> None:
    count = str(len(words.split()) - 1)
    result = process(COMP_WORDS=words, COMP_CWORD=count, _QUANTKIT_COMPLETE="bash_complete")
    assert expected in result.out.splitlines()


def test_plan_says_it_all(run: Run) -> None:
    result = run("plan", "tiny-glm", "--gpu", "h200", "--gpus", "1")
    assert result.code == 0, result.err
    for word in ("routed_expert", "prefill", "decode", "speed", "vllm", "context"):
        assert word in result.out, word
    found = document(run, "plan", "tiny-glm", "--gpu", "h200", "--gpus", "1")
    assert len(found["fate_rows"]) == found["tensors"] == 763


def test_a_written_plan_is_what_is_executed(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    planned = document(run, "plan", "tiny-glm", "--group-size", "128", "--method", "rtn", "-o", plan)
    assert json.loads(plan.read_text())["plan_id"] == planned["plan_id"]
    assert run("convert", "--plan", plan, "-o", tmp_path / "w4", "-q").code == 0
    assert document(run, "inspect", tmp_path / "w4")["manifest"]["recipe"]["decode"]["group_size"] == 128
    plan.write_text(plan.read_text().replace('"group_size":128', '"group_size":64'))
    assert run("convert", "--plan", plan, "-o", tmp_path / "other").code == 2


def test_dry_run_is_plan_and_writes_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dry, plan = document(run, "convert", "tiny-glm", "--dry-run"), document(run, "plan", "tiny-glm")
    assert dry["plan_id"] == plan["plan_id"] and dry.keys() == plan.keys()
    assert list(tmp_path.iterdir()) == []


def test_a_source_without_fp8_needs_the_option(run: Run, tmp_path: Path) -> None:
    source = write_moe(tmp_path / "bf16", "qwen3_moe", storage="bf16")
    refused = run("convert", source, "-o", tmp_path / "w4")
    assert refused.code == 3 and "--make-fp8" in refused.err
    made = run("convert", source, "-o", tmp_path / "w4", "--make-fp8", "--method", "rtn")
    assert made.code == 0, made.err


def test_a_directory_wins_over_a_name(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_moe(tmp_path / "tiny-glm", "mixtral")
    monkeypatch.chdir(tmp_path)
    assert document(run, "inspect", "tiny-glm")["family"] == "mixtral"


def test_a_recipe_names_its_source(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit import api

    assert api.resolve("glm-5.2").source == "zai-org/GLM-5.2-FP8"
    assert api.resolve("zai-org/GLM-5.2-FP8").recipe is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run("plan", "glm-5.2").code == 4  # not in the cache, and no network: the environment's fault


def test_a_quick_verification_does_not_claim_what_it_left_out(run: Run, tmp_path: Path) -> None:
    run("convert", "tiny-qwen3", "--method", "rtn", "-o", tmp_path / "w4")
    seen = run("verify", tmp_path / "w4", "--quick")
    assert seen.code == 0 and "every check passed" not in seen.out
    assert "not made" in seen.out and "\n--" in seen.out
