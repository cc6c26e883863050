"""Builds the native kernels and says where the packages lie; everything else is in pyproject.toml.

The library has a C ABI and is loaded through ctypes (``quantkit_kernels/native.py``), so it is named
``libquantkit_kernels.so``, without a Python version, and a wheel is tagged for any Python 3 on one platform. It is
optional: without a C++ compiler the installation succeeds and the torch twin is used.

Each source that needs an instruction set beyond the platform's baseline is compiled with its own flags; the
library picks one at run time. Results must be the same bits everywhere, hence no fast-math and no contraction.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOTS = (".", "kernels", "recipes", "serve", "evals")
# Data beside a package in the tree, inside it in a wheel (quantkit_evals/bundled.py finds both). pyproject.toml
# can only look packages up by the names of their folders.
DATA = {f"quantkit_evals.data.{name}": f"evals/{name}" for name in ("gates", "tasks")}
FOUND = {
    name: f"{root}/{name.replace('.', '/')}"
    for root in ROOTS
    for name in find_namespace_packages(root, include=["quantkit*"])
}
PACKAGES = FOUND | {name: folder for name, folder in DATA.items() if Path(folder).is_dir()}

CSRC = "kernels/csrc"
FLAGS = [
    "-std=c++17", "-O3", "-fno-fast-math", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti",
    "-fvisibility=hidden", "-g0", "-Wall", "-Wextra", "-Wno-psabi",
]  # fmt: skip
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"]
ISA_FLAGS = {  # by the end of a source's name
    "_avx2": ["-mavx2", "-mfma"],
    "_avx512": AVX512,
    "_avx512_bf16": [*AVX512, "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni"],
}
# For `make sanitize`: the run-time libraries must be loaded before Python, so this is never what is installed.
SANITIZE = (
    ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g1"]
    if os.environ.get("QUANTKIT_SANITIZE")
    else []
)
SOURCES = sorted(path.as_posix() for path in Path(CSRC).glob("*.cpp"))
HEADERS = sorted(path.as_posix() for path in Path(CSRC).glob("*.h"))


def isa_flags(source: str) -> list[str]:
    stem = Path(source).stem
    return next((flags for suffix, flags in ISA_FLAGS.items() if stem.endswith(suffix)), [])


def is_x86_64() -> bool:
    """Whether every architecture of this build is x86-64 (macOS may build for others through ARCHFLAGS)."""
    return platform.machine().lower() in ("x86_64", "amd64") and "arm64" not in os.environ.get("ARCHFLAGS", "")


class BuildNative(build_ext):
    """Compiles each source with its flags and links one library under a fixed name."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        objects: list[str] = []
        for source in ext.sources:
            flags = [*ext.extra_compile_args, *(isa_flags(source) if is_x86_64() else [])]
            try:
                objects += self._compile(ext, source, flags)
            except CompileError:
                if not isa_flags(source):
                    raise
                print(f"{source}: left out: does not compile with {isa_flags(source)}", file=sys.stderr)
                objects += self._compile(ext, source, ext.extra_compile_args)
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), extra_postargs=ext.extra_link_args, target_lang="c++"
        )

    def _compile(self, ext: Extension, source: str, flags: list[str]) -> list[str]:
        self.compiler.force = True  # objects do not know of changed headers or flags
        return list(
            self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                include_dirs=[CSRC],
                extra_postargs=flags,
                depends=ext.depends,
            )
        )


class AnyPythonWheel(bdist_wheel):
    """py3-none-PLATFORM: the library does not depend on a Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    ext_modules=[
        Extension(
            "quantkit_kernels.libquantkit_kernels",
            sources=SOURCES,
            depends=HEADERS,
            extra_compile_args=FLAGS + SANITIZE,
            extra_link_args=SANITIZE,
            language="c++",
            optional=not SANITIZE,
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPythonWheel},
)
