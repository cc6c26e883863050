"""Reading checkpoints: files, headers, index, scales. Nothing is loaded until its bytes are asked for.

``open_checkpoint`` is the way in. The names below load on first use, because numpy must not be imported by
``quantkit --help``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .header import FileInfo
    from .sidefiles import SideFile
    from .source import BUNDLED, open_checkpoint
    from .store import FileStore
    from .tensor import Storage, StoredWeight, TensorInfo

_HOME = {
    "BUNDLED": "source", "Checkpoint": "checkpoint", "FileInfo": "header", "FileStore": "store",
    "SideFile": "sidefiles", "Storage": "tensor", "StoredWeight": "tensor", "TensorInfo": "tensor",
    "open_checkpoint": "source",
}  # fmt: skip

__all__ = [
    "BUNDLED",
    "Checkpoint",
    "FileInfo",
    "FileStore",
    "SideFile",
    "Storage",
    "StoredWeight",
    "TensorInfo",
    "open_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME[name]}", __name__), name)
