"""Header-only, sparse copies of published checkpoints: exact names, dtypes, shapes and sizes, no data.

    python bench/make_headers.py FACTS OUT [--shard-gib 5]

FACTS names a table in tests/data/facts (it lists every tensor pattern of a published checkpoint). The files have
their published size but occupy almost no disk (holes read as zeros), so a 705 GiB checkpoint can be planned on a
laptop. Shards are filled in string order of names, as the GLM repositories are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from quantkit.safetensors_header import render_header
from quantkit.scheme import OutputTensor
from tests.facts import expand
from tests.facts import facts as load_table


def write_sparse(table_name: str, out: Path, shard_bytes: int) -> tuple[int, int, int]:
    """Write the sparse checkpoint; returns (tensor bytes, tensors, shards)."""
    table = load_table(table_name)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(table["config"]))
    shards: list[list[OutputTensor]] = [[]]
    used = total = 0
    tensors = [OutputTensor(name, entry["dtype"], tuple(entry["shape"])) for entry, name in expand(table)]
    for tensor in sorted(tensors, key=lambda t: t.name):
        if shards[-1] and used + tensor.nbytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.nbytes
        total += tensor.nbytes
    weight_map = {}
    for k, shard in enumerate(shards, 1):
        name = f"model-{k:05d}-of-{len(shards):05d}.safetensors"
        header = render_header(shard)
        with open(out / name, "wb") as f:
            f.write(header)
            os.ftruncate(f.fileno(), len(header) + sum(t.nbytes for t in shard))
        weight_map.update((t.name, name) for t in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return total, len(weight_map), len(shards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts")
    parser.add_argument("out", type=Path)
    parser.add_argument("--shard-gib", type=float, default=5.0)
    a = parser.parse_args()
    total, tensors, shards = write_sparse(a.facts, a.out, int(a.shard_gib * 2**30))
    print(f"{total:,} bytes in {tensors:,} tensors and {shards} shards at {a.out}")


if __name__ == "__main__":
    main()
