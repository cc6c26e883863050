"""Compiles every Triton kernel ahead of time, without a GPU: its registers, shared memory, spills.

    python -m tools.kernel_resources [--arch 90] [--arch 100] [--one-each] [--json FILE]

A stand-in for the CUDA driver names the architecture; the compiler and ptxas come with triton. Nothing is taken
from or left in triton's cache. Run it without TRITON_INTERPRET: interpreted kernels can't be compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from quantkit_kernels.forward.triton.launch import Launch
from tools.kernel_launches import launches

ARCHITECTURES = (90, 100)


@dataclass(frozen=True)
class Resources:
    """One compiled configuration of a kernel.

    Attributes:
        kernel: its name; ``constants`` its compile-time constants in words.
        arch: 90 for sm_90, 100 for sm_100.
        warps: of a program, 32 threads each.
        registers: of a thread; shared: bytes of a program; spilled: bytes of a thread, stores and loads.
        tensor_memory: columns of a program, of 512; sm_100 has it.
        tensor_core: which matrix instruction it uses, or none.
    """

    kernel: str
    constants: str
    arch: int
    warps: int
    registers: int
    shared: int
    spilled: int
    tensor_memory: int
    tensor_core: str


class _Driver:
    """What triton asks of a driver before it launches."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)  # kernels are kept per device: one for each architecture

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(arch: int, *, one_each: bool = False) -> Iterator[Resources]:
    """Compiles each launch for ``arch``, or one of each kernel and kind of page; raises what ptxas says."""
    triton.runtime.driver.set_active(_Driver(arch))
    triton.knobs.nvidia.dump_ptxas_log = True
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        found = launches()
        if one_each:
            found = list({(x.kernel.__name__, x.constants.get("FP8")): x for x in found}.values())
        for launch in found:
            yield _compile(launch, arch)


def _compile(launch: Launch, arch: int) -> Resources:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        kernel = launch.kernel.warmup(*launch.arguments, grid=(1,), **launch.constants, **launch.options)
    log, ptx = said.getvalue(), kernel.asm["ptx"]
    used = re.search(r"Used (\d+) registers", log)
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    instructions = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
    found = [name for name, instruction in instructions.items() if instruction in ptx]
    constants = " ".join(f"{name}={value}" for name, value in launch.constants.items())
    return Resources(
        launch.kernel.__name__, constants, arch, launch.options["num_warps"], int(used.group(1)) if used else 0,
        kernel.metadata.shared, spilled, getattr(kernel.metadata, "tmem_size", 0) or 0, "+".join(found) or "none",
    )  # fmt: skip


def table(rows: list[Resources]) -> str:
    """As markdown."""
    columns = [field.name for field in fields(Resources)]
    lines = [f"| {' | '.join(str(getattr(row, column)) for column in columns)} |" for row in rows]
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", type=int, action="append", choices=ARCHITECTURES, help="default: both")
    parser.add_argument(
        "--one-each", action="store_true", help="one configuration of each kernel and kind of page"
    )
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    rows = [row for arch in options.arch or ARCHITECTURES for row in compile_all(arch, one_each=options.one_each)]
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
