"""check_page_tags, 64 requests x 256 pages, the Python call included; against the numpy twin and a torch compare.

python bench/kernels/tags.py [FILE.json]
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from limits import best

from measure import Row, write_rows
from quantkit_kernels.tags import check_page_tags, check_page_tags_twin

REQUESTS, PAGES, POOL = 64, 256, 65536


def rows() -> list[Row]:
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 2**63, POOL, dtype=np.uint64)
    table = rng.permutation(POOL)[: REQUESTS * PAGES].reshape(REQUESTS, PAGES).astype(np.int32)
    expected, tags, counts = table.copy(), pool[table], np.full(REQUESTS, PAGES, np.int32)
    t_pool, t_tags = (torch.from_numpy(x.view(np.int64)) for x in (pool, tags))
    t_table, t_expected = torch.from_numpy(table), torch.from_numpy(expected)
    calls = {
        "native": lambda: check_page_tags(table, expected, tags, pool, counts),
        "twin": lambda: check_page_tags_twin(table, expected, tags, pool, counts),
        "torch": lambda: ((t_table == t_expected) & (t_pool[t_table] == t_tags)).all(1),
    }
    # not in turns: the threads of torch go on spinning
    times = {name: best(call, 0.3, 50) for name, call in calls.items()}
    name = f"check_page_tags, {REQUESTS} requests x {PAGES} pages"
    native = times["native"] * 1e6
    return [
        Row(name, native, "us", "numpy twin", times["twin"] * 1e6, "<= 30 us", native <= 30),
        Row("  the same compare in torch", times["torch"] * 1e6, "us"),
    ]


if __name__ == "__main__":
    write_rows(rows(), sys.argv[1] if len(sys.argv) > 1 else None)
