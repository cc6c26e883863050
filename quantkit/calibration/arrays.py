"""Where the large arrays of a stream lie: in memory, or where another maker puts them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Arrays(Protocol):
    """Makes the large arrays of a stream, which live as long as it does."""

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> Tensor: ...

    def trim(self) -> None:
        """Called often: memory of arrays that lie elsewhere too (in mapped files) may be given back."""


class InMemory:
    """Arrays that lie in memory."""

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        import numpy as np
        import torch

        return torch.from_numpy(np.zeros(shape, dtype))

    def trim(self) -> None:
        pass
