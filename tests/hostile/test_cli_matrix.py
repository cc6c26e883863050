"""Every hostile input through the command line: documented exit code, one error, nothing under the final name.

Each case builds a source (or spoils a place) and says what the message must name. All cases run the same checks:
``plan`` and ``convert``, for people and as ``--json``.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from quantkit.cli.main import main
from tests.builders import (
    Raw,
    bf16,
    f32,
    file_bytes,
    fp8_block,
    moe,
    raw_bytes,
    write_checkpoint,
    write_moe,
    zeros,
)

EXPERT = "model.layers.1.mlp.experts.2.up_proj"
WEIGHT, SCALE = f"{EXPERT}.weight", f"{EXPERT}.weight_scale_inv"
FIRST, SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
Tensors = dict[str, Raw]


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> Result:
        capfd.readouterr()
        code = main([str(a) for a in arguments])
        return Result(code, *capfd.readouterr())

    return call


def assert_one_error(result: Result, code: int, parts: tuple[str, ...]) -> None:
    assert result.code == code, result
    assert len(re.findall(r"^error: ", result.err, re.M)) == 1, result.err
    assert "Traceback" not in result.err
    message = result.err[result.err.index("error: ") :]
    assert all(line.startswith(("error: ", "  accepted: ", "  hint: ")) for line in message.splitlines()), message
    assert "  hint: " in message or "  accepted: " in message, message  # the way out
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"


def refused(run: Run, source: Path, out: Path, code: int, parts: tuple[str, ...], *options: str) -> None:
    """``convert`` stops with one error, in both forms, and leaves nothing under the final name."""
    for form in ((), ("--json",)):
        result = run("convert", source, "-o", out, "--method", "rtn", *options, *form)
        assert_one_error(result, code, parts)
        assert not os.path.lexists(out)
        if form:
            document = json.loads(result.out)
            assert document["exit_code"] == code and document["error"]["message"] in result.err
        else:
            assert result.out == ""


# sources that headers or config give away: plan refuses them too


def spoiled(
    folder: Path, change: Callable[[Tensors], object], family: str = "glm_moe_dsa", **options: Any
) -> None:
    tensors, config = moe(family, **options)
    change(tensors)
    write_checkpoint(folder, tensors, config, shards=3)


def reheaded(folder: Path, change: Callable[[dict[str, dict[str, list[int]]]], str]) -> None:
    content = (folder / FIRST).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    (folder / FIRST).write_bytes(raw_bytes(change(header), content[8 + length :]))


def truncated(m: Path) -> tuple[str, ...]:
    os.truncate(m / SECOND, (m / SECOND).stat().st_size - 1)
    return SECOND, "tensor '", "truncated"


def long_header(m: Path) -> tuple[str, ...]:
    content = bytearray((m / FIRST).read_bytes())
    content[:8] = (1 << 40).to_bytes(8, "little")
    (m / FIRST).write_bytes(content)
    return FIRST, "over the format's limit"


def duplicate_key(m: Path) -> tuple[str, ...]:
    def change(header: dict[str, dict[str, list[int]]]) -> str:
        name = next(n for n in header if n != "__metadata__")
        return json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"

    reheaded(m, change)
    return FIRST, "twice"


def overlap(m: Path) -> tuple[str, ...]:
    def change(header: dict[str, dict[str, list[int]]]) -> str:
        one = next(e for n, e in header.items() if n != "__metadata__" and e["data_offsets"][0])
        one["data_offsets"] = [x - 2 for x in one["data_offsets"]]
        return json.dumps(header)

    reheaded(m, change)
    return FIRST, "tensor '", "overlap"


def missing_shard(m: Path) -> tuple[str, ...]:
    (m / SECOND).unlink()
    return INDEX, SECOND


def tensor_twice(m: Path) -> tuple[str, ...]:
    (m / "extra.safetensors").write_bytes(file_bytes({WEIGHT: f32(np.zeros((2, 2)))}))
    return "extra.safetensors", WEIGHT


def missing_scale(m: Path) -> tuple[str, ...]:
    spoiled(m, lambda t: t.pop(SCALE))
    return "safetensors", WEIGHT, "without a scale"


def wrong_scale(m: Path) -> tuple[str, ...]:
    spoiled(m, lambda t: t.update({SCALE: f32(np.ones((1, 1)))}))
    return "safetensors", SCALE, "[1, 1]"


def two_scales(m: Path) -> tuple[str, ...]:
    spoiled(m, lambda t: t.update({f"{EXPERT}.weight_scale": t[SCALE]}))
    return "safetensors", WEIGHT, "several scales"


def no_group_size_fits(m: Path) -> tuple[str, ...]:
    spoiled(m, lambda t: None, "qwen3_moe", intermediate=80)
    return "safetensors", "down_proj.weight", "80 input features"


def expert_gap(m: Path) -> tuple[str, ...]:
    gone = (".experts.3.", ".experts.7.", ".experts.15.")
    spoiled(m, lambda t: [t.pop(n) for n in list(t) if any(g in n for g in gone)], experts=16)
    return "safetensors", "tensor '", "13 of 16 routed experts; missing: 3, 7, 15"


def experts_of_two_shapes(m: Path) -> tuple[str, ...]:
    spoiled(m, lambda t: t.update(fp8_block(EXPERT, np.ones((128, 128), np.float32))))
    return "safetensors", WEIGHT, "[128, 128]"


def expert_of_rank_3(m: Path) -> tuple[str, ...]:
    spoiled(m, lambda t: t.update({WEIGHT: bf16(np.ones((2, 2, 2), np.float32))}) or t.pop(SCALE))
    return "safetensors", "experts.2", "up projection"


def scale_without_weight(m: Path) -> tuple[str, ...]:
    spoiled(m, lambda t: t.pop(WEIGHT))
    return "safetensors", SCALE, "missing"


def fused_experts(m: Path) -> tuple[str, ...]:
    def change(t: Tensors) -> None:
        for name in [n for n in t if ".experts." in n]:
            del t[name]
        t["model.layers.1.mlp.experts.gate_up_proj"] = zeros("BF16", (4, 256, 256), 2)

    spoiled(m, change)
    return "experts.gate_up_proj", "fused"


def e5m2(m: Path) -> tuple[str, ...]:
    spoiled(m, lambda t: t.update({WEIGHT: Raw("F8_E5M2", t[WEIGHT].shape, t[WEIGHT].data)}))
    return "safetensors", WEIGHT, "e5m2"


def bf16_source(m: Path) -> tuple[str, ...]:
    write_moe(m, "qwen3_moe", storage="bf16")
    return "safetensors", "tensor '", "--make-fp8"


def int4_source(m: Path) -> tuple[str, ...]:
    write_moe(m, "kimi_k25")
    return "safetensors", "tensor '", "--make-fp8"


def index_leads_out(m: Path) -> tuple[str, ...]:
    index = json.loads((m / INDEX).read_text())
    index["weight_map"]["x"] = "../outside.safetensors"
    (m / INDEX).write_text(json.dumps(index))
    return INDEX, "'../outside.safetensors'"


def link_to_nowhere(m: Path) -> tuple[str, ...]:
    (m / SECOND).unlink()
    (m / SECOND).symlink_to("/no/such/blob")
    return SECOND, "leads nowhere"


def names_no_pattern_can_tell(m: Path) -> tuple[str, ...]:
    spoiled(m, lambda t: t.update({"model.layers.{L}.mlp.w.weight": bf16(np.ones((2, 32), np.float32))}))
    return ("{L}",)


def missing_layers(m: Path) -> tuple[str, ...]:
    config = json.loads((m / "config.json").read_text())
    (m / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    return "config.json", "999,999,997 of the 1,000,000,000"


def astronomic_expert_count(m: Path) -> tuple[str, ...]:
    config = json.loads((m / "config.json").read_text())
    (m / "config.json").write_text(json.dumps({**config, "n_routed_experts": 10**30}))
    return "safetensors", "missing: 4, 5, 6, 7, 8 and "


def config(content: bytes, *parts: str) -> Callable[[Path], tuple[str, ...]]:
    def case(m: Path) -> tuple[str, ...]:
        (m / "config.json").write_bytes(content)
        return "config.json", *parts

    return case


def quantization(key: str, value: object, *parts: str) -> Callable[[Path], tuple[str, ...]]:
    def case(m: Path) -> tuple[str, ...]:
        content = json.loads((m / "config.json").read_text())
        content["quantization_config"][key] = value
        (m / "config.json").write_text(json.dumps(content))
        return "config.json", *parts

    return case


def file_name_no_text(m: Path) -> tuple[str, ...]:
    (m / INDEX).unlink()
    (m / SECOND).rename(m / "model-\udcff.safetensors")
    return "model-\\udcff.safetensors", "UTF-8"


PLANNED: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "truncated shard": truncated, "header over the limit": long_header, "duplicate key": duplicate_key,
    "overlapping offsets": overlap, "missing shard": missing_shard, "tensor in two shards": tensor_twice,
    "missing scale": missing_scale, "scale of wrong shape": wrong_scale, "two scales": two_scales,
    "no group size fits": no_group_size_fits, "expert gap": expert_gap,
    "experts of two shapes": experts_of_two_shapes,
    "expert of rank 3": expert_of_rank_3, "scale without weight": scale_without_weight,
    "fused experts": fused_experts, "e5m2": e5m2, "BF16 source": bf16_source, "INT4 source": int4_source,
    "index leads out": index_leads_out, "link to nowhere": link_to_nowhere, "odd names": names_no_pattern_can_tell,
    "missing layers": missing_layers, "astronomic experts": astronomic_expert_count,
    "file name no text": file_name_no_text,
    "config not UTF-8": config('{"name": "Änderung"}'.encode("latin-1"), "UTF-8"),
    "config half a surrogate": config(b'{"x": "\\ud800"}', "not valid Unicode"),
    "config too deep": config(b'{"a":' * 500 + b"1" + b"}" * 500, "nested too deeply"),
    "config empty": config(b"", "not a JSON object"),
    "blocks of another size": quantization("weight_block_size", [64, 64], "tensor '", "blocks of 64 x 64"),
    "blocks of no size": quantization("weight_block_size", [0, 64], "weight_block_size is [0, 64]"),
    "ignored modules no list": quantization("modules_to_not_convert", 3, "modules_to_not_convert is 3"),
    "ignored modules no pattern": quantization("modules_to_not_convert", ["re:("], "regular expression"),
    "NaN in quantization_config": quantization("x", float("nan"), "NaN"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANNED)
def test_refused_by_plan_and_convert(run: Run, tmp_path: Path, name: str) -> None:
    source = write_moe(tmp_path / "model", "glm_moe_dsa", shards=3)
    parts = PLANNED[name](source)
    for form in ((), ("--json",)):
        assert_one_error(run("plan", source, *form), 3, parts)
    refused(run, source, tmp_path / "out", 3, parts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]  # not even a working directory


# sources that only their data give away: convert stops, and says where


def scaled(value: float) -> Callable[[Tensors], object]:
    def change(t: Tensors) -> None:
        scales = np.frombuffer(t[SCALE].data, "<f4").copy()
        scales[0] = value
        t[SCALE] = Raw("F32", t[SCALE].shape, scales.tobytes())

    return change


def nan_code(t: Tensors) -> None:
    t[WEIGHT] = Raw("F8_E4M3", t[WEIGHT].shape, b"\x7f" + t[WEIGHT].data[1:])


DATA: dict[str, tuple[Callable[[Tensors], object], str, str]] = {
    "NaN in a scale": (scaled(np.nan), SCALE, "nan"),
    "infinite scale": (scaled(np.inf), SCALE, "inf"),
    "negative scale": (scaled(-1.0), SCALE, "-1.0"),
    "zero scale over codes": (scaled(0.0), SCALE, "is zero"),
    "product overflows": (scaled(3e38), WEIGHT, "row 0, column 0"),
    "NaN code": (nan_code, WEIGHT, "row 0, column 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_refused_while_converting(run: Run, tmp_path: Path, name: str) -> None:
    change, tensor, says = DATA[name]
    spoiled(tmp_path / "model", change)
    assert run("plan", tmp_path / "model").code == 0
    refused(run, tmp_path / "model", tmp_path / "out", 3, ("safetensors", tensor, says))


def test_squares_beyond_float32(run: Run, tmp_path: Path) -> None:
    tensors, content = moe("qwen3_moe", storage="bf16")
    tensors[WEIGHT] = f32(np.full((128, 256), 1e30, np.float32))
    source = write_checkpoint(tmp_path / "model", tensors, content)
    refused(run, source, tmp_path / "out", 3, ("safetensors", WEIGHT, "overflow"), "--make-fp8")


# odd, but sound: converted, and verified


def zeroed(t: Tensors) -> None:
    t.update({name: Raw(raw.dtype, raw.shape, bytes(len(raw.data))) for name, raw in t.items()})


def named(name: str) -> Callable[[Tensors], object]:
    return lambda t: t.update(fp8_block(name, np.ones((4, 32), np.float32)))


SOUND: dict[str, tuple[Callable[[Tensors], object], dict[str, Any]]] = {
    "weights of zeros": (zeroed, {}),
    "one expert only": (lambda t: None, {"experts": 1}),
    "subnormal scale": (scaled(1e-42), {}),
    "scalar": (lambda t: t.update(x=f32(np.array(1.0))), {}),
    "empty tensor": (lambda t: t.update({"x.weight": zeros("BF16", (0, 128), 2)}), {}),
    "empty FP8": (lambda t: t.update({
        "x.weight": zeros("F8_E4M3", (0, 128), 1), "x.weight_scale_inv": zeros("F32", (0, 1), 4)}), {}),
    "path traversal": (named("../../evil"), {}), "absolute path": (named("/etc/evil"), {}),
    "no module": (named(""), {}), "only a dot": (named("."), {}),
    "quote": (named('a"b'), {}), "line end": (named("a\nb"), {}), "escape": (named("\x1b[31m"), {}),
    "unicode": (named("\u65e5\u672c\u202e"), {}), "long": (named("x" * 5000), {}),
    "endless number": (named(f"model.layers.{'9' * 5000}.w"), {}),
    "leading zero": (named("model.layers.01.w"), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_converted_and_verified(run: Run, tmp_path: Path, name: str) -> None:
    change, sizes = SOUND[name]
    spoiled(tmp_path / "model", change, **sizes)
    before = sorted(tmp_path.parent.iterdir())
    made = run("convert", tmp_path / "model", "-o", tmp_path / "out", "--method", "rtn")
    assert made.code == 0, made.err
    checked = run("verify", tmp_path / "out")
    assert checked.code == 0, checked.out
    inspected = run("inspect", tmp_path / "model")
    assert not set(made.err + checked.out + inspected.out) & {"\x1b", "\u202e"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert sorted(tmp_path.parent.iterdir()) == before


def test_files_around_the_weights(run: Run, tmp_path: Path) -> None:
    """Linked files, a shard outside the index, NaN in the config, a name that is no text: told, and all there."""
    real = write_moe(tmp_path / "real", "qwen3_moe")
    (real / "mtp.safetensors").write_bytes(file_bytes({"mtp.x": f32(np.zeros(1))}))
    content = json.loads((real / "config.json").read_text())
    (real / "config.json").write_text(json.dumps({**content, "x": float("nan")}))
    (real / "note-\udcff.txt").write_text("x")
    (tmp_path / "model").mkdir()
    for path in real.iterdir():
        (tmp_path / "model" / path.name).symlink_to(path)
    made = run("convert", tmp_path / "model", "-o", tmp_path / "a b \u00e9", "--method", "rtn")
    assert made.code == 0 and "mtp.safetensors" in made.err and "note-\\udcff.txt" in made.err
    assert run("verify", tmp_path / "a b \u00e9", "--against", tmp_path / "model").code == 0
    assert not any(path.is_symlink() for path in (tmp_path / "a b \u00e9").rglob("*"))


# places


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("places") / "model", "qwen3_moe", layers=1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_disk_refuses(run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """And the same command finishes once the disk takes data again."""

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        says = "no space left" if code == errno.ENOSPC else "cannot write here"
        refused(run, source, tmp_path / "out", 4, (str(tmp_path / "out.partial"), says))
    assert run("convert", source, "-o", tmp_path / "out", "--method", "rtn").code == 0
    assert run("verify", tmp_path / "out").code == 0


def test_targets_that_cannot_be(run: Run, source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis").write_text("mine")
    cases = {
        source / "out": (2, "inside the source"), source.parent: (2, str(source.parent)), source: (2, str(source)),
        tmp_path / "file": (2, "is a file"), tmp_path / "full": (2, "not empty"),
        tmp_path / "file" / "below" / "it": (4, f"{tmp_path / 'file'} is a file, not a directory"),
        tmp_path / "file" / "out": (4, "cannot write here"), tmp_path / ("y" * 300): (4, "cannot write here"),
    }  # fmt: skip
    before = {path: path.read_bytes() for path in (*source.iterdir(), tmp_path / "file", tmp_path / "full/thesis")}
    for out, (code, says) in cases.items():
        assert_one_error(run("convert", source, "-o", out, "--method", "rtn", "--json"), code, (says,))
    assert_one_error(run("convert", source, "-o", ""), 2, ("the path is empty",))
    assert_one_error(run("plan", source, "-o", source / "config.json"), 2, ("config.json", "no plan"))
    assert before == {path: path.read_bytes() for path in before}
    assert not [path for path in (*source.rglob("*"), *tmp_path.rglob("*")) if path.name.endswith(".partial")]


def test_pipes_and_devices(run: Run, source: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert_one_error(run("plan", tmp_path / "pipe.safetensors"), 3, ("pipe.safetensors", "pipe, socket or device"))
    assert_one_error(run("plan", "/dev/null"), 3, ("/dev/null", "device"))
    assert_one_error(run("convert", "--plan", "/dev/zero"), 2, ("/dev/zero", "is a device"))
    assert run("plan", source, "--recipe", "/dev/zero").code == 2
    assert run("plan", "~no-such-user/model").code in (2, 4)


# artifacts


@pytest.fixture(scope="module")
def artifact(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifact") / "out"
    assert main(["convert", str(source), "-o", str(out), "--method", "rtn", "-q"]) == 0
    return out


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda a: (a / name).write_bytes(change((a / name).read_bytes()))


def view_of_another(a: Path) -> None:
    manifest = json.loads((a / "decode/quantkit_view.json").read_text())
    (a / "decode/quantkit_view.json").write_text(json.dumps({**manifest, "pair_id": "0" * 64}))


def listed_outside(a: Path) -> None:
    manifest = json.loads((a / "manifest.json").read_text())
    manifest["files"]["../secret"] = manifest["files"]["tensors.jsonl"]
    (a / "manifest.json").write_text(json.dumps(manifest))


def without_a_view(a: Path) -> None:
    manifest = json.loads((a / "manifest.json").read_text())
    del manifest["views"]["prefill"]
    (a / "manifest.json").write_text(json.dumps(manifest))


def record_pipe(a: Path) -> None:
    (a / "tensors.jsonl").unlink()
    os.mkfifo(a / "tensors.jsonl")


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


DEEP = b"[" * 100_000
DAMAGE: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "weights flipped": (rewritten("decode/model-layer-00000.safetensors", flipped), 1, "model-layer-00000"),
    "weights cut": (rewritten("decode/model-other.safetensors", lambda d: d[:-8]), 1, "model-other"),
    "weights removed": (lambda a: (a / "decode/model-other.safetensors").unlink(), 1, "model-other"),
    "stranger": (lambda a: (a / "decode/x.safetensors").write_bytes(b""), 1, "x.safetensors"),
    "records cut": (rewritten("tensors.jsonl", lambda d: d[d.index(b"\n") + 1 :]), 1, "tensors.jsonl"),
    "records doubled": (rewritten("tensors.jsonl", lambda d: d + d), 1, "tensors.jsonl"),
    "records reordered": (rewritten("tensors.jsonl", lambda d: b"".join(d.splitlines(True)[::-1])), 1, "tensors"),
    "records too deep": (rewritten("tensors.jsonl", lambda d: DEEP), 1, "tensors.jsonl"),
    "records a pipe": (record_pipe, 1, "tensors.jsonl"),
    "another's view": (view_of_another, 1, "decode/quantkit_view.json"),
    "no mark": (lambda a: (a / "prefill/quantkit_view.json").unlink(), 1, "prefill/quantkit_view.json"),
    "mark too deep": (rewritten("decode/quantkit_view.json", lambda d: DEEP), 1, "decode/quantkit_view.json"),
    "attachment changed": (rewritten("attachments/report.json", flipped), 1, "attachments/report.json"),
    "attachments too deep": (rewritten("attachments/attachments.json", lambda d: DEEP), 1, "attachments.json"),
    "config groups no object": (
        rewritten("decode/config.json", lambda d: d.replace(b'"config_groups": {', b'"config_groups": 1, "x": {')),
        1, "config_groups"),
    "listed outside": (listed_outside, 1, "../secret"),
    "no manifest": (lambda a: (a / "manifest.json").unlink(), 3, "no manifest.json"),
    "manifest too deep": (rewritten("manifest.json", lambda d: DEEP), 3, "manifest.json"),
    "manifest without a view": (without_a_view, 3, "there is no prefill view"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_verify_finds_damage(run: Run, artifact: Path, tmp_path: Path, name: str) -> None:
    change, code, says = DAMAGE[name]
    copy = shutil.copytree(artifact, tmp_path / "copy")  # also: an artifact may be copied and renamed
    change(copy)
    for form in ((), ("--json",)):
        result = run("verify", copy, *form)
        assert result.code == code and "Traceback" not in result.err, result
        assert says in result.out + result.err
        if form:
            json.loads(result.out)
    assert run("inspect", copy).code in (0, 3)
