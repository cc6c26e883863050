"""Which file each job writes to: files by decoder layer, split where they grow over the limit.

A layer's files are its own, so that a later change to one layer renames or rewrites no other layer's file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from .fate import Job, Shard

_DIGITS = re.compile(r"(\d{1,18})")  # Python refuses numbers of thousands of digits


def natural_key(name: str) -> tuple[str | int, ...]:
    """Sort key in which expert 10 comes after expert 9.

    Odd places hold numbers and even ones text, so that two keys always compare.
    """
    return tuple(int(part) if i % 2 else part for i, part in enumerate(_DIGITS.split(name)))


def pack(view: str, jobs: Iterable[tuple[int | None, Job]], max_bytes: int) -> tuple[Shard, ...]:
    """Files of a view in layer order, tensors outside the layers last.

    Args:
        jobs: (decoder layer or None, job) in any order.
        max_bytes: limit of tensor data per file; a single job above it gets a file of its own.
    """
    by_layer: dict[int | None, list[Job]] = defaultdict(list)
    for layer, job in jobs:
        by_layer[layer].append(job)
    shards: list[Shard] = []
    for layer in sorted(by_layer, key=lambda n: (n is None, n or 0)):
        stem = "model-other" if layer is None else f"model-layer-{layer:05d}"
        ordered = sorted(by_layer[layer], key=lambda job: natural_key(job.sources[0]))
        for number, part in enumerate(_split(ordered, max_bytes), start=1):
            suffix = "" if number == 1 else f"-part-{number}"
            shards.append(Shard(view, f"{stem}{suffix}.safetensors", layer, tuple(part)))
    return tuple(shards)


def _split(jobs: list[Job], max_bytes: int) -> list[list[Job]]:
    parts: list[list[Job]] = [[]]
    filled = 0
    for job in jobs:
        if parts[-1] and filled + job.nbytes > max_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(job)
        filled += job.nbytes
    return parts
