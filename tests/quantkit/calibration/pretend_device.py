"""A second device without one: tensors on it are wrappers that refuse to meet ordinary tensors, as CUDA's do.

While ``pretend_device`` is active, ``cuda:0`` exists for this thread: what is created there or moved there is a
``There``. An operation that mixes it with an ordinary tensor of one or more dimensions raises ``MixedDevices``,
and so does ``numpy()``. Copies between devices and ordinary index tensors are allowed, as torch allows them.
Numbers are those of the CPU, so that results can be compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = "cuda:0"
_AS_TORCH_ALLOWS = {"aten::copy_", "aten::index.Tensor", "aten::index_put_", "aten::_to_copy"}


class MixedDevices(Exception):
    """An operation on tensors of two devices, or a host's view of a device's memory."""


class There(torch.Tensor):
    """A tensor on the pretended device, made of an ordinary one."""

    _inner: torch.Tensor

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> There:
        found: There = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, real.shape, strides=real.stride(), storage_offset=real.storage_offset(), dtype=real.dtype,
            device="cpu", requires_grad=False,
        )  # fmt: skip
        found._inner = real
        return found

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(DEVICE)

    def data_ptr(self) -> int:
        return self._inner.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        raise MixedDevices("numpy() of a tensor that is not on the host")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"There({self._inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        here = [t for t in tensors if not isinstance(t, There) and t.ndim]
        name = func.name()
        if here and not (name in _AS_TORCH_ALLOWS and (name == "aten::copy_" or isinstance(tensors[0], There))):
            raise MixedDevices(f"{name} of tensors here and there")
        result = func(*tree_map(_real, args), **tree_map(_real, kwargs))
        if func._schema.is_mutable and args and result is _real(args[0]):  # in place
            return args[0]
        return tree_map(_there, result)


class _Pretence(TorchFunctionMode):
    """Sends what names the device there, and what names the CPU back."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cpu:
            return _real(args[0]).clone() if isinstance(args[0], There) else args[0]
        if func is torch.Tensor.to:
            return _moved(func, args, kwargs)
        if "device" in kwargs and _is_there(kwargs["device"]):
            result = func(*tree_map(_real, args), **{**tree_map(_real, kwargs), "device": "cpu"})
            return _there(result)
        return func(*args, **kwargs)


def _moved(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    target = kwargs.pop("device", None)
    if rest and isinstance(rest[0], (str, torch.device)):
        target = rest.pop(0)
    elif rest and isinstance(rest[0], torch.Tensor):
        target = rest[0].device
        rest = [rest[0].dtype, *rest[1:]]
    moved = func(_real(tensor), *rest, **kwargs) if rest or kwargs else _real(tensor)
    if target is None:
        return _there(moved) if isinstance(tensor, There) else moved
    if torch.device(target).type == "meta":
        return func(tensor, target, *rest, **kwargs)
    if _is_there(target):
        return tensor if isinstance(tensor, There) and moved is tensor._inner else _there(moved.clone())
    return moved.clone() if isinstance(tensor, There) else moved


def _is_there(device: Any) -> bool:
    return device is not None and torch.device(device) == torch.device(DEVICE)


def _real(value: Any) -> Any:
    return value._inner if isinstance(value, There) else value


def _there(value: Any) -> Any:
    return There(value) if isinstance(value, torch.Tensor) and not isinstance(value, There) else value


@contextmanager
def pretend_device() -> Iterator[str]:
    """For this thread."""
    with _Pretence():
        yield DEVICE
