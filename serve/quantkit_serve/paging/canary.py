"""Content canary: have the bytes of a page changed since they were written? Compared at a hand-off.

Tags tell whose a page is, not what is in it. A writer that comes late, or bytes moved within a page, leave the tag
alone; a digest of the bytes does not. It reads every byte (a millisecond per MB), so it is an option, and it sees
changes between seal and check only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .page import PageRef

DIGEST_BYTES = 16


class Seal(NamedTuple):
    """What a page held when it was sealed."""

    ref: PageRef
    digest: bytes


class Canary:
    """Over the memory of the pages, which it only reads.

    Args:
        memory: uint8 ``[N, page_bytes]`` each, of every layer or of all together; rows contiguous.

    Raises:
        TypeError, ValueError: no such arrays.
    """

    def __init__(self, memory: Sequence[NDArray[np.uint8]]) -> None:
        for pages in memory:
            if pages.dtype != np.uint8:
                raise TypeError(f"memory must be of uint8, got {pages.dtype}")
            if pages.ndim != 2 or len(pages) != len(memory[0]):
                raise ValueError(
                    f"memory must be [N, page_bytes] with one N, got {[list(p.shape) for p in memory]}"
                )
            if pages.shape[1] > 1 and pages.strides[1] != 1:
                raise ValueError(f"memory must have contiguous rows, got strides {list(pages.strides)}")
        self._memory = tuple(memory)

    def seal(self, refs: Iterable[PageRef]) -> list[Seal]:
        """Once all writers of these pages have landed; a page that isn't full may not grow before ``check``."""
        return [Seal(ref, self._digest(ref)) for ref in refs]

    def check(self, seals: Iterable[Seal]) -> list[PageRef]:
        """Pages whose bytes are not what they were."""
        return [seal.ref for seal in seals if self._digest(seal.ref) != seal.digest]

    def _digest(self, ref: PageRef) -> bytes:
        digest = blake2b(digest_size=DIGEST_BYTES)
        for pages in self._memory:
            digest.update(pages[ref.page].data)
        return digest.digest()
