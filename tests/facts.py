"""Checkpoints with the published names, dtypes and shapes, and no bytes, from the tables in ``tests/data/facts``.

Each table lists tensor patterns (``{i}`` layer, ``{e}`` expert) of one published checkpoint, the layers they
occur in, the count over the whole checkpoint and the published sizes, so that a plan at full size can be tested
in memory. ``layers_of`` is checked against the counts: a misread table fails loudly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quantkit.checkpoint.tensor import StoredWeight, TensorInfo
from quantkit.checkpoint.weights import find_weights
from quantkit.dtypes import tensor_bytes

FOLDER = Path(__file__).parent / "data" / "facts"


def names() -> list[str]:
    """Names of the tables, for parametrised tests."""
    return sorted(p.stem for p in FOLDER.glob("*.json"))


def facts(name: str) -> dict[str, Any]:
    """One table as it stands."""
    loaded: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return loaded


def layers_of(entry: Mapping[str, Any]) -> list[int | None]:
    """Layer numbers in which a pattern occurs; ``[None]`` when its name has no ``{i}``."""
    if "{i}" not in entry["name"]:
        return [None]
    layers: list[int | None] = []
    for part in re.sub(r"\(.*\)", "", entry["layers"]).strip().split(","):
        if part == "...":
            continue
        first, _, last = part.partition("-")
        layers += list(range(int(first), int(last or first) + 1))
    if "..." in entry["layers"]:
        step = layers[1] - layers[0]  # type: ignore[operator]
        layers = list(range(layers[0], layers[-1] + 1, step))  # type: ignore[arg-type]
    return layers


def expand(table: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every tensor of a table as (its table entry, its full name)."""
    for entry in table["tensors"]:
        count = 0
        for layer in layers_of(entry):
            stem = entry["name"].replace("{i}", str(layer))
            for expert in range(entry.get("experts", 1)):
                count += 1
                yield entry, stem.replace("{e}", str(expert))
        if count != entry["count"]:
            raise AssertionError(f"{entry['name']} expands to {count}, the table says {entry['count']}")


def entries(name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """``expand`` of a table by name."""
    return expand(facts(name))


def tensors(name: str) -> dict[str, TensorInfo]:
    """All tensors of a table, laid out in one imaginary file."""
    found: dict[str, TensorInfo] = {}
    offset = 0
    for entry, full in entries(name):
        shape = tuple(entry["shape"])
        nbytes = tensor_bytes(entry["dtype"], shape)
        found[full] = TensorInfo(full, entry["dtype"], shape, "model.safetensors", offset, nbytes)
        offset += nbytes
    return found


class FactsCheckpoint:
    """What planning needs of a checkpoint, without bytes."""

    kind, revision, fingerprint = "local", None, "0" * 64
    warnings: tuple[str, ...] = ()
    files: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, name: str) -> None:
        self.label, self.config, self.tensors = name, facts(name)["config"], tensors(name)
        self._weights = find_weights(self.tensors, self.config)

    def weights(self) -> Mapping[str, StoredWeight]:
        return self._weights
