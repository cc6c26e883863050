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
from ctypes import c_char_p, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from .library import Library

_RUNTIME = re.compile(r"lib(gomp|iomp5|omp)[-.\w]*\.(so[.\d]*|dylib)$")


class _Runtime(NamedTuple):
    """Entry points, and the file that they are in (None: it can't be told)."""

    parallel: c_void_p
    thread_number: c_void_p
    path: str | None


@cache
def _runtime() -> _Runtime | None:
    """The one that torch's own calls go to; None without one.

    Found as the loader finds it for torch: what the whole process sees comes first (a preloaded runtime, the one
    that torch loads for all), then what torch's library was linked to. Not by a file's name: other packages bring
    runtimes of their own (scikit-learn has one, and is imported by half of all evaluations), and threads of two of
    them on the same cores make a step thirty times slower.
    """
    import torch

    linked = (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")
    for name in (None, *map(str, linked)):
        try:
            handle = ctypes.CDLL(name)
            parallel = ctypes.cast(handle.GOMP_parallel, c_void_p)
            number = ctypes.cast(handle.omp_get_thread_num, c_void_p)
        except (OSError, AttributeError):
            continue
        return _Runtime(parallel, number, _file_of(parallel))
    return None


def runtime_path() -> str | None:
    """File of the runtime that torch uses; None without one, or where it can't be told."""
    found = _runtime()
    return None if found is None else found.path


class _Place(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (("file", c_char_p), ("base", c_void_p), ("symbol", c_char_p), ("address", c_void_p))


def _file_of(address: c_void_p) -> str | None:
    place = _Place()
    try:
        dladdr = ctypes.CDLL(None).dladdr
    except (OSError, AttributeError):
        return None
    dladdr.argtypes = [c_void_p, ctypes.POINTER(_Place)]
    return os.fsdecode(place.file) if dladdr(address, ctypes.byref(place)) and place.file else None


def shipped_runtimes() -> list[Path]:
    """The runtimes in torch's package, which is looked for but not imported."""
    spec = find_spec("torch")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [path for folder in folders for path in sorted((Path(folder) / "lib").glob("lib*omp*"))]
    return [path for path in found if _RUNTIME.search(str(path))]


def lend(library: Library) -> str | None:
    """Hand the runtime's entry points to the library.

    Returns:
        File of the runtime; None without one (then everything runs in one thread), or where it can't be told.
    """
    found = _runtime()
    if found is None:
        return None
    function = library.handle.qk_set_openmp
    function.argtypes, function.restype = [c_void_p, c_void_p], None
    function(found.parallel, found.thread_number)
    _take_back_in_children(library.handle)
    return found.path


@cache
def _take_back_in_children(handle: ctypes.CDLL) -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: handle.qk_set_openmp(None, None))
