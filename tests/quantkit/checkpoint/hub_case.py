"""The repository that the Hub tests serve."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from quantkit.checkpoint.hub import Retry

REPO = "acme/moe"
SHARD = "model-00001-of-00002.safetensors"
OTHER = "model-00002-of-00002.safetensors"
QUICK = Retry(first_wait_s=0.01, longest_wait_s=0.05)
MIB = 1 << 20


def noise(size: int, seed: int) -> bytes:
    """Bytes that differ at every position and cost no time: a seeded block, numbered by repetition."""
    block = hashlib.shake_256(bytes([seed])).digest(65536 - 4)
    return b"".join(i.to_bytes(4, "little") + block for i in range(size // 65536 + 1))[:size]


SHARD_BYTES, OTHER_BYTES = noise(12 * MIB + 5, 1), noise(9 * MIB, 2)
CONFIG = b'{"model_type": "qwen3_moe"}'
INDEX_NAME = "model.safetensors.index.json"
INDEX = json.dumps({"metadata": {}, "weight_map": {"a": SHARD, "b": OTHER}}).encode()


def cached(tmp_path: Path) -> Path:
    """Folder of the test repository in the Hub cache."""
    return tmp_path / "hf" / "hub" / "models--acme--moe"
