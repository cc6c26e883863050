"""Configs and tensor lists of published checkpoints: real names, dtypes and shapes, no data.

Each JSON holds ``config``, the byte and tensor count of the whole checkpoint, and rows
``[name pattern, dtype, shape, layers, count]`` (``{i}`` layer, ``{e}`` expert, layers like ``3-77`` or ``0,1,2``).
Source: public header dumps and index files of the repositories; GLM-5.1's FP8 split, Qwen3-235B's geometry and
GLM-4.7's tensors are inferred from sister models. ``modules_to_not_convert`` lists are left out (up to 541 names).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
NAMES = tuple(sorted(p.stem for p in _HERE.glob("*.json")))


@dataclass(frozen=True)
class Published:
    """``tensors``: every tensor of the checkpoint, name -> (dtype, shape)."""

    config: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    nbytes: int
    count: int


def config(name: str) -> dict[str, Any]:
    """A fresh copy of the published config.json."""
    loaded: dict[str, Any] = json.loads((_HERE / f"{name}.json").read_text())["config"]
    return loaded


@cache
def load(name: str) -> Published:
    raw = json.loads((_HERE / f"{name}.json").read_text())
    text = raw["config"].get("text_config", raw["config"])
    experts = next(text[k] for k in ("n_routed_experts", "num_experts", "num_local_experts") if k in text)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for pattern, dtype, shape, layers, count in raw["tensors"]:
        before = len(tensors)
        for layer in _layers(layers):
            at_layer = pattern.replace("{i}", str(layer))
            for expert in range(experts) if "{e}" in pattern else (0,):
                tensors[at_layer.replace("{e}", str(expert))] = (dtype, tuple(shape))
        if len(tensors) - before != count:
            raise ValueError(f"{name}: {pattern} gives {len(tensors) - before} tensors, not {count}")
    return Published(raw["config"], tensors, raw["bytes"], raw["count"])


def _layers(text: str) -> list[int]:
    if not text:
        return [0]
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found
