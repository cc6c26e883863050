"""lm-eval's own ``hf`` model on plain copies of a view, asked directly: nothing of our adapter takes part."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quantkit.artifact.bf16_copy import plain_config
from quantkit.artifact.dequantize import dequantize
from quantkit.checkpoint import open_checkpoint
from quantkit.checkpoint.tensor import Storage

SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write_float32_copy(view: Path, out: Path) -> Path:
    """The numbers that a view's codes stand for, in float32, exactly; without multi-token-prediction layers."""
    from safetensors.torch import save_file

    checkpoint = open_checkpoint(view)
    layers = checkpoint.config["num_hidden_layers"]
    stored = checkpoint.weights()
    quantized = {part.name for w in stored.values() if w.storage is not Storage.PLAIN for part in w.parts}
    tensors = {
        f"{module}.weight": torch.from_numpy(dequantize(checkpoint, weight).copy())
        for module, weight in stored.items()
    }
    for name, info in checkpoint.tensors.items():
        if name not in quantized and name not in tensors:
            array = torch.from_numpy(checkpoint.array(name).copy())
            is_bf16 = info.dtype == "BF16"
            tensors[name] = (array.view(torch.int16).view(torch.bfloat16) if is_bf16 else array).float()
    kept = {name: tensor for name, tensor in tensors.items() if not _is_beyond(name, layers)}
    out.mkdir(parents=True)
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(plain_config(checkpoint.config) | {"dtype": "float32"}))
    for name in SIDE_FILES:
        if (view / name).is_file():
            (out / name).write_bytes((view / name).read_bytes())
    return out


def hf(folder: Path, dtype: str, batch_size: int) -> Any:
    """lm-eval's ``hf`` model of a directory, on the CPU, as its users make it."""
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return HFLM(pretrained=str(folder), dtype=dtype, device="cpu", batch_size=batch_size)


def evaluated(
    model: Any, tasks: Sequence[Any], chosen: dict[str, list[int]]
) -> dict[str, dict[int, dict[str, Any]]]:
    """What lm-eval logs of each item: task -> number of the document -> metric -> value.

    Args:
        tasks: objects of lm-eval.
        chosen: numbers of documents, by task.
    """
    from lm_eval.evaluator import evaluate

    result = evaluate(
        model, {"tasks": {task.config.task: task for task in tasks}, "groups": {}},
        samples=dict(chosen), bootstrap_iters=0,
    )  # fmt: skip
    return {
        name: {sample["doc_id"]: {m: sample[m] for m in sample["metrics"]} for sample in samples}
        for name, samples in result["samples"].items()
    }


def _is_beyond(name: str, layers: int) -> bool:
    parts = name.split(".layers.")
    return len(parts) > 1 and int(parts[1].split(".")[0]) >= layers
