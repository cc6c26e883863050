"""Make an FP8 block-scaled checkpoint in the publishers' layout from a model trained by ``tools.train_tiny``.

    python -m tools.export_fp8 trained tiny-glm-5.2-fp8 --scale-dtype F32      (BF16 for Qwen3)

As the published ones: one tensor per expert and projection, float8 e4m3 with one scale per 128 x 128 block named
``weight_scale_inv``, router, norms, embedding, head, eh_proj and the indexer's weights_proj left in BF16,
correction biases in float32, shards in string order of the layer numbers. On purpose harder than most: the scales
of o_proj and of all experts of layer 3 stand in another shard than their weights.

Independent of quantkit's own FP8 kernel, so that the bundled models are no echo of it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

Tensor = torch.Tensor
BLOCK = 128
E4M3_MAX = 448.0
SHARD_BYTES = 3 << 20
_KEPT_BF16 = re.compile(r"(^lm_head|\.embed_tokens|\.mlp\.gate|\.weights_proj|\.eh_proj)\.weight$")
_LATE_SCALE = re.compile(r"(\.self_attn\.o_proj|\.layers\.3\.mlp\.experts\..*)\.weight_scale_inv$")
_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")


def stored_dtype(name: str, ndim: int) -> str:
    """The safetensors dtype in which the publishers store this tensor."""
    if name.endswith("e_score_correction_bias"):
        return "F32"
    if ndim == 2 and name.endswith(".weight") and not _KEPT_BF16.search(name):
        return "F8_E4M3"
    return "BF16"


def fp8_block(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes ``[O, I]`` and float32 scales ``[ceil(O/128), ceil(I/128)]`` (largest magnitude / 448)."""
    o, i = weight_OI.shape
    pad_o, pad_i = -o % BLOCK, -i % BLOCK
    padded = F.pad(weight_OI.float(), (0, pad_i, 0, pad_o))
    tiles = padded.view((o + pad_o) // BLOCK, BLOCK, (i + pad_i) // BLOCK, BLOCK)
    scale = tiles.abs().amax((1, 3)).clamp_min(1e-12) / E4M3_MAX
    codes = (tiles / scale[:, None, :, None]).view(o + pad_o, i + pad_i)[:o, :i].clamp(-E4M3_MAX, E4M3_MAX)
    return codes.to(torch.float8_e4m3fn).contiguous(), scale.contiguous()


def read_trained(trained: Path, num_layers: int) -> dict[str, Tensor]:
    """All weights under their published names, experts taken apart, the MTP layer after the last layer."""
    tensors: dict[str, Tensor] = {}
    for file in sorted((trained / "bf16").glob("*.safetensors")):
        tensors |= load_file(file)
    if (trained / "mtp.safetensors").exists():
        for name, value in load_file(trained / "mtp.safetensors").items():
            name = name.removeprefix("layer.")
            name = "shared_head.norm.weight" if name == "norm.weight" else name
            tensors[f"model.layers.{num_layers}.{name}"] = value
    flat: dict[str, Tensor] = {}
    for name, value in tensors.items():
        fused = _FUSED.match(name)
        if not fused or value.dim() != 3:
            flat[name] = value
            continue
        for e, expert in enumerate(value):
            parts = expert.chunk(2, 0) if fused[2] == "gate_up_proj" else (expert,)
            names = ("gate_proj", "up_proj") if fused[2] == "gate_up_proj" else ("down_proj",)
            flat |= {f"{fused[1]}.{e}.{n}.weight": p for n, p in zip(names, parts, strict=True)}
    return flat


def quantize(flat: dict[str, Tensor], scale_dtype: torch.dtype) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors as stored, and the names of the modules that were left unquantized."""
    stored: dict[str, Tensor] = {}
    kept: list[str] = []
    for name, value in flat.items():
        dtype = stored_dtype(name, value.dim())
        if dtype == "F8_E4M3":
            stored[name], scale = fp8_block(value)
            stored[f"{name}_scale_inv"] = scale.to(scale_dtype)
            continue
        stored[name] = (value.float() if dtype == "F32" else value.bfloat16()).contiguous()
        if name.endswith(".weight") and value.dim() == 2:
            kept.append(name.removesuffix(".weight"))
    return stored, sorted(kept)


def save_sharded(tensors: dict[str, Tensor], out: Path) -> None:
    """Shards of about 3 MiB in string order of the names, and the index."""
    shards: list[dict[str, Tensor]] = [{}]
    for name in sorted(n for n in tensors if not _LATE_SCALE.search(n)):
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensors[name].nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensors[name]
    shards[-1] |= {n: t for n, t in tensors.items() if _LATE_SCALE.search(n)}
    weight_map: dict[str, str] = {}
    for k, shard in enumerate(shards, 1):
        file = f"model-{k:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for t in tensors.values())
    _write_json(
        out / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )


def export(trained: Path, out: Path, scale_dtype: torch.dtype) -> None:
    """Write the FP8 checkpoint of a trained model into the new directory ``out``."""
    out.mkdir(parents=True)
    config = json.loads((trained / "bf16" / "config.json").read_text())
    flat = read_trained(trained, config["num_hidden_layers"])
    stored, kept = quantize(flat, scale_dtype)
    save_sharded(stored, out)
    config.pop("torch_dtype", None)
    config["dtype"] = "bfloat16"
    if (trained / "mtp.safetensors").exists():
        config["num_nextn_predict_layers"] = 1
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }
    _write_json(out / "config.json", config)
    for file in (trained / "bf16").iterdir():
        if file.suffix != ".safetensors" and not (out / file.name).exists() and "index" not in file.name:
            shutil.copyfile(file, out / file.name)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trained", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scale-dtype", choices=("F32", "BF16"), default="F32")
    args = parser.parse_args(argv)
    export(args.trained, args.out, torch.float32 if args.scale_dtype == "F32" else torch.bfloat16)


if __name__ == "__main__":
    main()
