"""What backends there are on this machine and why one is off, for ``quantkit env`` and whoever forces one.

Nothing big is imported: versions come from installed metadata, OpenMP's runtime from torch's folder, devices from
the driver's own library. ``registry.py`` chooses; this explains.
"""

from __future__ import annotations

import ctypes
import os
from importlib import metadata, util
from typing import Any

from .library import Library, NativeMissing
from .openmp import shipped_runtimes

TRITON_INTERPRET = "TRITON_INTERPRET"  # triton's own setting: kernels run in its interpreter, without a GPU
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # cuda.h, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


def describe_backends() -> dict[str, dict[str, Any]]:
    """Each backend: ``why_not`` (None if it can run), and what identifies it."""
    return {"torch": _torch(), "cpu": _cpu(), "triton": _triton()}


def why_not_triton() -> str | None:
    """What is missing for the ``triton`` backend and what to do about it; None if it can run.

    The interpreter (TRITON_INTERPRET=1) counts as a device: the tests use it.
    """
    if util.find_spec("triton") is None:
        return "triton is not installed (it comes with torch for CUDA; pip install triton)"
    if util.find_spec("torch") is None:
        return "torch is not installed (pip install torch)"
    if os.environ.get(TRITON_INTERPRET) != "1" and not cuda_devices():
        return f"no CUDA device was found (check nvidia-smi; {TRITON_INTERPRET}=1 does without one, slowly)"
    return None


def cuda_devices() -> list[str]:
    """Name and compute capability of every device that the CUDA driver shows; empty without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return []
        return [_device(cuda, number) for number in range(count.value)]
    except (OSError, AttributeError):
        return []


def _device(cuda: ctypes.CDLL, number: int) -> str:
    name, major, minor = ctypes.create_string_buffer(256), ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGetName(name, len(name), number)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, number)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, number)
    return f"{name.value.decode(errors='replace')} (sm_{major.value}{minor.value})"


def _torch() -> dict[str, Any]:
    version = _version("torch")
    return {"why_not": None if version else "torch is not installed (pip install torch)", "version": version}


def _cpu() -> dict[str, Any]:
    try:
        library = Library.load()
    except (NativeMissing, ValueError) as problem:
        return {"why_not": str(problem)}
    runtime = next(iter(shipped_runtimes()), None)
    return {
        "why_not": None,
        "library": library.name,
        "level": library.isa,
        "levels": list(library.isa_available),
        "openmp": runtime.name if runtime else None,
        "threads": _threads() if runtime else 1,
    }


def _threads() -> int:
    """What torch will use: OMP_NUM_THREADS, else the cores that this process may run on."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _triton() -> dict[str, Any]:
    return {"why_not": why_not_triton(), "version": _version("triton"), "devices": cuda_devices()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
