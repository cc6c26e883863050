"""The content canary sees any byte of a page, in any layer, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit_serve.paging import Canary, PageRef

REFS = [PageRef(1, 10), PageRef(3, 11)]


@pytest.fixture
def memory() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    layers = rng.integers(0, 256, (4, 2, 24), dtype=np.uint8)  # pages of two layers, interleaved
    return [layers[:, 0], layers[:, 1]]


@pytest.mark.parametrize(("layer", "page", "byte"), [(0, 1, 0), (1, 1, 23), (0, 3, 12), (1, 3, 0)])
def test_a_changed_byte(memory: list[np.ndarray], layer: int, page: int, byte: int) -> None:
    canary = Canary(memory)
    seals = canary.seal(REFS)
    assert canary.check(seals) == []
    memory[layer][page, byte] ^= 1
    assert canary.check(seals) == [ref for ref in REFS if ref.page == page]
    memory[layer][page, byte] ^= 1
    assert canary.check(seals) == []


def test_bytes_that_changed_places(memory: list[np.ndarray]) -> None:
    canary = Canary(memory)
    seals = canary.seal(REFS)
    memory[0][1] = memory[0][1][::-1].copy()
    assert canary.check(seals) == REFS[:1]


def test_other_pages_are_not_its_business(memory: list[np.ndarray]) -> None:
    canary = Canary(memory)
    seals = canary.seal(REFS)
    memory[0][0] ^= 255
    memory[1][2] ^= 255
    assert canary.check(seals) == []


@pytest.mark.parametrize(
    ("memory", "error", "text"),
    [
        ([np.zeros((2, 4), np.int8)], TypeError, "uint8"),
        ([np.zeros(4, np.uint8)], ValueError, "page_bytes"),
        ([np.zeros((2, 4), np.uint8), np.zeros((3, 4), np.uint8)], ValueError, "one N"),
        ([np.zeros((4, 2), np.uint8).T], ValueError, "contiguous rows"),
    ],
)
def test_memory_that_is_not_pages(memory: list[np.ndarray], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Canary(memory)
