"""What model tests share: transformers' float32 model of a checkpoint, and ways to feed a runner.

The oracle's weights are the float32 numbers that the codes stand for (``view[module].dequantize()``), written as a
plain checkpoint and loaded by transformers, so that nothing of ours but the dequantizer takes part.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.artifact.bf16_copy import plain_config
from quantkit.artifact.dequantize import dequantize
from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.checkpoint.tensor import Storage
from quantkit_serve.batch import Batch
from quantkit_serve.config import CacheConfig, EngineConfig, ModelConfig
from quantkit_serve.model.runner import ModelRunner, open_runner
from quantkit_serve.phase import Phase

PAGE = 16


def transformers_model(source: str | Path | Checkpoint, folder: Path) -> Any:
    """transformers' model of a checkpoint in float32, through a copy in ``folder``."""
    import transformers
    from safetensors.torch import save_file

    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    layers = checkpoint.config.get("text_config", checkpoint.config)["num_hidden_layers"]
    stored = checkpoint.weights()
    quantized = {part.name for w in stored.values() if w.storage is not Storage.PLAIN for part in w.parts}
    tensors = {
        f"{module}.weight": torch.from_numpy(dequantize(checkpoint, weight).copy())
        for module, weight in stored.items()
    }
    for name, info in checkpoint.tensors.items():
        if name not in quantized and name not in tensors:
            tensors[name] = _plain(checkpoint, name, info.dtype)
    tensors = {name: t for name, t in tensors.items() if not _is_beyond(name, layers)}
    config = plain_config(checkpoint.config) | {"dtype": "float32"}
    if "text_config" in config:  # kimi_k25: the language model alone
        config, prefix = config["text_config"] | {"dtype": "float32"}, "language_model."
        tensors = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    if config["model_type"] == "kimi_k2":  # of which transformers knows the architecture only
        config["model_type"] = "deepseek_v3"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def _plain(checkpoint: Checkpoint, name: str, dtype: str) -> Tensor:
    array = checkpoint.array(name)
    if dtype == "BF16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(np.array(array)).float()


def _is_beyond(name: str, layers: int) -> bool:
    parts = name.split(".layers.")
    return (len(parts) > 1 and int(parts[1].split(".")[0]) >= layers) or name.endswith("inv_freq")


def reference_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Float32 ``[T, V]`` of one sequence."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits.float()


def runner(source: str | Path, pages: int = 64, cache: dict[str, Any] | None = None, **model: Any) -> ModelRunner:
    """A runner with ``pages`` pages of 16 tokens; by default float32 compute, FP8 weights and f32 pages."""
    settings = {"weights": "fp8", "compute": "float32", **model}
    kv = {"kv_dtype": "f32" if settings["compute"] == "float32" else "bf16", "page_size": PAGE, **(cache or {})}
    found = open_runner(source, EngineConfig(ModelConfig(**settings), CacheConfig(**kv)))
    found.allocate(pages)
    return found


def step(phase: Phase, runs: Sequence[tuple[Sequence[int], int, Sequence[int]]], last_only: bool = False) -> Batch:
    """A step over runs of (token ids, position of the first, pages)."""
    sizes = [len(ids) for ids, _, _ in runs]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    table = np.full((len(runs), max(len(pages) for _, _, pages in runs)), -1, np.int32)
    for row, (_, _, pages) in enumerate(runs):
        table[row, : len(pages)] = pages
    return Batch(
        phase=phase,
        token_ids=np.concatenate([np.array(ids, np.int64) for ids, _, _ in runs]),
        positions=np.concatenate([np.arange(at, at + len(ids)) for ids, at, _ in runs]),
        cu_tokens=starts,
        lengths=np.array([at + len(ids) for ids, at, _ in runs], np.int32),
        block_table=table,
        logit_rows=starts[1:].astype(np.int64) - 1 if last_only else np.arange(starts[-1], dtype=np.int64),
    )


def logits_of(
    found: ModelRunner, ids: Sequence[int], cuts: Sequence[int] = (), phase: Phase = Phase.PREFILL, first: int = 0
) -> Tensor:
    """Logits ``[T, V]`` of one sequence, computed in runs that end at ``cuts``; its pages start at ``first``."""
    pages = list(range(first, first + -(-len(ids) // PAGE)))
    ends = [0, *cuts, len(ids)]
    return torch.cat([found.run(step(phase, [(ids[a:b], a, pages)])) for a, b in itertools.pairwise(ends)])


def tokens(seed: int, count: int, vocab: int = 64) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, vocab, count)]
