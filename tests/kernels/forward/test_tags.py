"""Page tags of tensors on every implementation, and in Triton's interpreter, against the numpy twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit_kernels.forward.tags import check_page_tags
from quantkit_kernels.tags import check_page_tags_twin

SHAPES = [(40, 7, 9), (13, 300, 1000), (5, 1, 1), (3, 0, 4), (4, 3, 0)]


def case(seed: int, requests: int, entries: int, pages: int) -> list[np.ndarray]:
    """Half of the requests are right; the others have one entry wrong, or a count."""
    rng = np.random.default_rng(seed)
    table = rng.integers(0, max(pages, 1), (requests, entries), dtype=np.int32)
    pool = rng.integers(0, 2**64, pages, dtype=np.uint64)
    expected, tags = table.copy(), pool[table] if pages else np.zeros((requests, entries), np.uint64)
    counts = rng.integers(0, entries + 1, requests).astype(np.int32)
    for row in range(0, requests if entries else 0, 2):
        column, kind = rng.integers(entries), row // 2 % 5
        if kind == 0:
            table[row, column] = rng.choice([-1, pages, 2**31 - 1, -(2**31)])
        elif kind == 1:
            expected[row, column] ^= 1
        elif kind == 2:
            tags[row, column] ^= np.uint64(1 << 63)
        elif kind == 3:
            counts[row] = rng.choice([-1, entries + 1, 2**31 - 1])
    return [table, expected, tags, pool, counts]


def tensors(parts: list[np.ndarray]) -> list[Tensor]:
    return [torch.from_numpy(part) for part in parts]


@pytest.mark.parametrize(
    ("requests", "entries", "pages"), [(40, 7, 9), (13, 300, 1000), (5, 1, 1), (3, 0, 4), (4, 3, 0)]
)
def test_answers(requests: int, entries: int, pages: int, each_implementation: str) -> None:
    parts = case(entries, requests, entries, pages)
    wanted = check_page_tags_twin(*parts) if pages else parts[4] == 0
    assert check_page_tags(*tensors(parts)).tolist() == wanted.tolist()
    if requests == 40:
        assert 10 < wanted.sum() < 40


def test_no_requests_and_strided_rows(each_implementation: str) -> None:
    assert check_page_tags(*(part[:0] for part in tensors(case(1, 3, 4, 4)))).shape == (0,)
    parts = case(2, 9, 8, 20)
    wide = [np.concatenate([part, part], 1)[:, 3:11] if part.ndim == 2 else part for part in parts]
    assert check_page_tags(*tensors(wide)).tolist() == check_page_tags_twin(*wide).tolist()


def test_wrong_arguments_are_named() -> None:
    parts = tensors(case(3, 4, 5, 6))
    for place, name in enumerate(("block_table", "expected_pages", "expected_tags", "pool_tags", "counts")):
        with pytest.raises(TypeError, match=f"^{name} must be"):
            check_page_tags(*parts[:place], parts[place].float(), *parts[place + 1 :])
        with pytest.raises(ValueError, match=f"^{name} must"):
            check_page_tags(*parts[:place], parts[place][None], *parts[place + 1 :])
