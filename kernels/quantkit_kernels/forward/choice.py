"""Which implementation runs an operation of the forward pass.

QUANTKIT_KERNELS=torch|cpu|triton forces one for all. Otherwise the tensors' device decides: on a GPU Triton, in
host memory the native library where it was built, else the torch twin, with the warning of ``registry.backend``.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from types import ModuleType

from torch import Tensor

from quantkit_kernels.library import Library
from quantkit_kernels.openmp import lend
from quantkit_kernels.registry import ENV_BACKEND, NAMES, backend


def implementation(area: str, like: Tensor) -> ModuleType:
    """The module ``forward.<twin|cpu|triton>.<area>`` for tensors on the device of ``like``.

    Raises:
        ValueError: the backend that is forced is unknown, does not run on this device or is not there.
    """
    name = backend_for(like)
    return _module("twin" if name == "torch" else name, area)


def backend_for(like: Tensor) -> str:
    """``torch``, ``cpu`` or ``triton``; decided once for every kind of device."""
    return _backend(like.device.type)


@cache
def _backend(device: str) -> str:
    forced = os.environ.get(ENV_BACKEND) or None
    if forced is not None and forced not in NAMES:
        raise ValueError(f"{ENV_BACKEND}={forced!r} is not a backend; accepted: {', '.join(NAMES)}")
    on_gpu = device == "cuda"
    if forced == "cpu" and on_gpu:
        raise ValueError(f"{ENV_BACKEND}=cpu, but the tensors are on {device}")
    if forced == "triton" or (forced is None and on_gpu):
        return "triton"
    return "torch" if on_gpu else backend().name


@cache  # between two streams of weights the processor's caches hold nothing of the import system
def _module(folder: str, area: str) -> ModuleType:
    return import_module(f"{__package__}.{folder}.{area}")


@cache
def library() -> Library:
    """The native library with torch's OpenMP runtime lent to it."""
    found = Library.load()
    lend(found)
    return found
