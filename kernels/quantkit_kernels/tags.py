"""Page tags: is every page that a request relies on still the page that it was given?

The owner of a pool raises a page's tag whenever it frees the page. A request keeps (page, tag) of each page of its
history; before a step that reads them, one batched compare finds the requests whose table points elsewhere or
whose pages have been freed since. It finds stale pages; late writers need a quarantine and permuted bytes a
content check.

numpy arrays in and out, no torch: a multi-threaded torch operation costs more than the whole compare. Native code
where it was built (``registry.py``), else the numpy twin, with the same answers.

Legend: R requests, P entries of a row of the block table, N pages.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_char, c_char_p, c_int64, c_void_p, py_object, pythonapi
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .library import Library
from .registry import backend
from .types import I32

U64 = NDArray[np.uint64]
_INT32, _UINT64 = np.dtype(np.int32), np.dtype(np.uint64)
_SIGNATURE = [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64]
_pointer = (
    pythonapi.PyCapsule_GetPointer
)  # of __array_struct__: much cheaper than __array_interface__ or ctypes.data
_pointer.argtypes, _pointer.restype = [py_object, c_char_p], c_void_p


def check_page_tags(
    block_table: I32, expected_pages: I32, expected_tags: U64, pool_tags: U64, counts: I32
) -> NDArray[np.bool_]:
    """Whether each request's pages and their tags are the expected ones.

    Args:
        block_table: int32 ``[R, P]``, the pages that the next step would read.
        expected_pages: int32 ``[R, P]``, the pages that each request was given.
        expected_tags: uint64 ``[R, P]``, their tags when it was given them.
        pool_tags: uint64 ``[N]``, the tags now.
        counts: int32 ``[R]``, how many entries of a row count; the others may hold anything.

    All with contiguous rows, any distance between rows.

    Returns:
        bool ``[R]``. False too for a request with a page outside the pool or a count outside [0, P]: a broken
        request must not take the others with it.

    Raises:
        TypeError, ValueError: dtype, shape, alignment or strides do not fit; the message names the argument.
    """
    library = _native()
    arrays = (block_table, expected_pages, expected_tags, pool_tags, counts)
    if library is None:
        _check_all(*arrays)
        return check_page_tags_twin(*arrays)
    try:
        capsules = [array.__array_struct__ for array in arrays]
        requests = len(counts)
    except (AttributeError, TypeError):
        _check_all(*arrays)
        raise
    result = bytearray(requests)
    if library.call(
        "qk_check_page_tags",
        *[_pointer(c, None) for c in capsules],
        (c_char * requests).from_buffer(result),
        requests,
    ):
        _check_all(*arrays)  # says which
        raise RuntimeError("qk_check_page_tags refused its arguments: a bug in quantkit_kernels, please report it")
    return np.frombuffer(result, np.bool_)


def prepared_check(
    block_table: I32, expected_pages: I32, expected_tags: U64, pool_tags: U64, counts: I32
) -> Callable[[], bytearray]:
    """``check_page_tags`` of these very arrays, whatever they hold at each call, with less Python around it.

    Args, errors: as ``check_page_tags``; the arrays must not be resized.

    Returns:
        A function that gives a byte for each request, 1 or 0; overwritten by the next call.
    """
    arrays = (block_table, expected_pages, expected_tags, pool_tags, counts)
    _check_all(*arrays)
    library = _native()
    if library is None:
        return lambda: bytearray(check_page_tags_twin(*arrays).tobytes())
    requests = len(counts)
    capsules = [array.__array_struct__ for array in arrays]  # kept as long as the pointers into them
    result = bytearray(requests)
    function = library.handle.qk_check_page_tags
    args = (
        library.level,
        *[_pointer(c, None) for c in capsules],
        (c_char * requests).from_buffer(result),
        requests,
    )

    def check(held: Any = capsules) -> bytearray:
        if function(*args):
            raise RuntimeError("qk_check_page_tags refused arrays that were checked: a bug in quantkit_kernels")
        return result

    return check


def check_page_tags_twin(
    block_table: I32, expected_pages: I32, expected_tags: U64, pool_tags: U64, counts: I32
) -> NDArray[np.bool_]:
    """Reference of ``check_page_tags``; arguments as there, checked already."""
    requests, entries = block_table.shape
    used = np.arange(entries) < counts[:, None]
    inside = (block_table >= 0) & (block_table < pool_tags.size)
    tags = np.zeros((requests, entries), np.uint64)
    tags[inside] = pool_tags[block_table[inside]]
    good = inside & (block_table == expected_pages) & (tags == expected_tags)
    result: NDArray[np.bool_] = (good | ~used).all(axis=1) & (counts >= 0) & (counts <= entries)
    return result


@cache
def _native() -> Library | None:
    if backend().name != "cpu":
        return None
    library = Library.load()
    library.declare({"qk_check_page_tags": _SIGNATURE})
    return library


def _check_all(block_table: I32, expected_pages: I32, expected_tags: U64, pool_tags: U64, counts: I32) -> None:
    _check("block_table", block_table, _INT32, 2)
    _check("expected_pages", expected_pages, _INT32, 2, block_table.shape)
    _check("expected_tags", expected_tags, _UINT64, 2, block_table.shape)
    _check("pool_tags", pool_tags, _UINT64, 1)
    _check("counts", counts, _INT32, 1, block_table.shape[:1])


def _check(
    name: str, array: NDArray[Any], dtype: np.dtype[Any], dims: int, shape: tuple[int, ...] | None = None
) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name} must be a numpy array of {dtype}, got {found}")
    if array.ndim != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {list(array.shape)}")
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name} must be of shape {list(shape)}, got {list(array.shape)}")
    if not array.flags.aligned:
        raise ValueError(f"{name} is not aligned to its elements of {dtype.itemsize} bytes")
    if array.size and array.shape[-1] > 1 and array.strides[-1] != dtype.itemsize:
        raise ValueError(f"{name} must have contiguous rows, got strides {list(array.strides)}")
