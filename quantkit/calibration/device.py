"""Where the matrix products of calibration run: the CPU, or one CUDA device of this process.

On a device are the weights of the layer at hand, the batches that pass it, and one expert for each worker: its
weights, tokens, Hessian, factor and sweep. Hidden states, and what the experts of a layer get and give, stay in
host memory or mapped files, whatever their size. Reading, scale search and packing stay with the CPU's kernels;
that is why several workers make sense on one device.

Left out: experts of equal shape as one batch. Each has its own tokens, order of columns and dampening, on the CPU
a batch would gain nothing, and what it gains on a device has to be measured on one first.

The device is no part of what is asked: like another CPU it gives other bits of calibrated weights, not another
conversion. The journal holds it, so that a run is continued where it was begun, and the provenance states it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quantkit.errors import EnvironmentProblem, UsageError
from quantkit.units import format_bytes

if TYPE_CHECKING:
    from .memory import Shape

CPU = "cpu"
_SHARE = 0.9  # of a device's free memory; the rest is for its libraries
_FLOAT = 4


def open_device(name: str) -> str:
    """The device of this process, as torch calls it.

    Args:
        name: ``cpu``, ``cuda`` (of several processes of a machine each takes its own), or ``cuda:N``.

    Raises:
        UsageError: another name.
        EnvironmentProblem: this machine has no such device.
    """
    if name == CPU:
        return CPU
    kind, _, number = name.partition(":")
    if kind != "cuda" or (":" in name and not number.isdecimal()):
        raise UsageError(f"device {name!r}", where="--device", accepted="cpu, cuda or cuda:N")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        lacks = "finds no CUDA device" if torch.version.cuda else "is built without CUDA"
        raise EnvironmentProblem(
            f"torch {torch.__version__} {lacks}", where=f"--device {name}",
            accepted="cpu", hint="Omit the option, or install a torch that fits this machine's driver",
        )  # fmt: skip
    index = int(number) if number else int(os.environ.get("LOCAL_RANK", "0"))
    if index >= count:
        raise EnvironmentProblem(
            f"device {index} does not exist", where=f"--device {name}", accepted=f"cuda:0 to cuda:{count - 1}",
            hint="Start as many processes on a machine as it has devices",
        )  # fmt: skip
    return f"cuda:{index}"


def label_of(device: str) -> str | None:
    """What decides the bits that a device computes; None for the CPU."""
    if device == CPU:
        return None
    import torch

    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, torch {torch.__version__}"


def workers_on(device: str, workers: int, shape: Shape) -> int:
    """Tasks at once for which a device has memory.

    Raises:
        EnvironmentProblem: it has none for a single one.
    """
    if device == CPU:
        return workers
    import torch

    free = int(torch.cuda.mem_get_info(device)[0] * _SHARE)
    least = _FLOAT * shape.layer_weights + shape.task_bytes
    if free < least:
        raise EnvironmentProblem(
            f"{format_bytes(free)} of device memory are free, {format_bytes(least)} are needed", where=device,
            hint="Free the device, or calibrate on the CPU",
        )  # fmt: skip
    return min(workers, 1 + (free - least) // shape.task_bytes)


@contextmanager
def device_errors(device: str) -> Iterator[None]:
    """Make one clear error of a device that runs out of memory."""
    if device == CPU:
        yield
        return
    import torch

    try:
        yield
    except torch.OutOfMemoryError as problem:
        raise EnvironmentProblem(
            "out of device memory", where=device, hint="Fewer workers (-j) need less; the same command resumes"
        ) from problem
