"""The OpenMP runtime that torch brought into this process, lent to the native library.

A second runtime would keep threads of its own that spin on the cores torch's threads need; runtime.h says how the
library uses this one. Without a runtime the operations run in the calling thread.

So they do in the child of a fork: GNU's runtime still counts on the threads of the parent there, which no longer
exist, and would wait for them forever. Start processes that are to compute with threads afresh (``spawn``).
"""

from __future__ import annotations

import ctypes
import os
import re
from ctypes import c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from .library import Library

_RUNTIME = re.compile(r"lib(gomp|iomp5|omp)[-.\w]*\.(so[.\d]*|dylib)$")


@cache
def runtime_path() -> str | None:
    """Path of the runtime that is loaded (Linux), else of the one in torch's package; None without one."""
    import torch  # noqa: F401 - brings its runtime along

    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    loaded = [line.split(maxsplit=5)[-1] for line in lines]  # a path may hold spaces
    candidates = [path for path in (*loaded, *map(str, shipped_runtimes())) if _RUNTIME.search(path)]
    return next(iter(candidates), None)


def shipped_runtimes() -> list[Path]:
    """The runtimes in torch's package, which is looked for but not imported."""
    spec = find_spec("torch")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [path for folder in folders for path in sorted((Path(folder) / "lib").glob("lib*omp*"))]
    return [path for path in found if _RUNTIME.search(str(path))]


def lend(library: Library) -> str | None:
    """Hand the runtime's entry points to the library.

    Returns:
        Path of the runtime; None without one (then everything runs in one thread).
    """
    path = runtime_path()
    if path is None:
        return None
    try:
        runtime = ctypes.CDLL(path)
        parallel = ctypes.cast(runtime.GOMP_parallel, c_void_p)
        number = ctypes.cast(runtime.omp_get_thread_num, c_void_p)
    except (OSError, AttributeError):
        return None
    function = library.handle.qk_set_openmp
    function.argtypes, function.restype = [c_void_p, c_void_p], None
    function(parallel, number)
    _take_back_in_children(library.handle)
    return path


@cache
def _take_back_in_children(handle: ctypes.CDLL) -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: handle.qk_set_openmp(None, None))
