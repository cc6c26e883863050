"""Choice of the backend: explicit, forcible, one warning when the native library is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import quantkit_kernels

from .backends import native_levels

PACKAGE = Path(quantkit_kernels.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
needs_native = pytest.mark.skipif(not native_levels(), reason="the native library was not built")
REPORT = """
import json, sys, warnings
import numpy as np
import quantkit_kernels as kernels
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        result = kernels.float_to_int4(np.ones((2, 64), np.float32), 32)
said = [str(w.message) for w in caught if "quantkit_kernels" in str(w.message)]
print(json.dumps([kernels.describe(), said, "torch" in sys.modules, result.packed.tolist()]))
"""

CHOOSE = REPORT.replace("result = kernels.float_to_int4(np.ones((2, 64), np.float32), 32)", "kernels.backend()")
CHOOSE = CHOOSE.replace(", result.packed.tolist()", "")  # loads no torch: several times faster


def run(code: str, where: Path = PACKAGE.parent, **settings: str) -> subprocess.CompletedProcess[str]:
    """Python with the package found in ``where`` first."""
    clean = {k: v for k, v in os.environ.items() if k not in ("QUANTKIT_KERNELS", "QUANTKIT_CPU_ISA")}
    environment = clean | {"PYTHONPATH": str(where), "OMP_NUM_THREADS": "1"} | settings
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def copy_without_library(to: Path) -> Path:
    shutil.copytree(PACKAGE, to / "quantkit_kernels", ignore=shutil.ignore_patterns("libquantkit*", "__pycache__"))
    return to


@needs_native
def test_native_is_the_default_and_needs_no_torch() -> None:
    info, said, has_torch, _ = json.loads(run(REPORT).stdout)
    assert info["name"] == "cpu" and info["isa"] == info["isa_available"][-1] and info["why_not_cpu"] is None
    assert said == [] and not has_torch


@needs_native
@pytest.mark.parametrize("level", native_levels())
def test_level_can_be_forced(level: str) -> None:
    info, *_ = json.loads(run(CHOOSE, QUANTKIT_CPU_ISA=level).stdout)
    assert info["isa"] == level


def test_twin_can_be_forced_silently() -> None:
    info, said, has_torch = json.loads(run(CHOOSE, QUANTKIT_KERNELS="torch").stdout)
    assert (info["name"], info["forced"], info["isa"]) == ("torch", "torch", None)
    assert said == [] and not has_torch


def test_without_the_library_the_twin_is_used_with_one_warning(tmp_path: Path) -> None:
    info, said, has_torch, packed = json.loads(run(REPORT, copy_without_library(tmp_path)).stdout)
    assert has_torch and info["name"] == "torch" and "not built" in info["why_not_cpu"]
    assert len(said) == 1 and "not built" in said[0] and "torch twin" in said[0]
    twin = quantkit_kernels.float_to_int4(np.ones((2, 64), np.float32), 32)
    assert packed == twin.packed.tolist()


@pytest.mark.parametrize("content", [b"", b"not a library", b"\x7fELF" + bytes(100)])
def test_a_broken_library_is_explained(tmp_path: Path, content: bytes) -> None:
    package = copy_without_library(tmp_path)
    (package / "quantkit_kernels" / "libquantkit_kernels.so").write_bytes(content)
    info, said, _ = json.loads(run(CHOOSE, package).stdout)
    assert info["name"] == "torch" and "cannot be loaded" in info["why_not_cpu"] and len(said) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"QUANTKIT_KERNELS": "cuda"}, "QUANTKIT_KERNELS='cuda' is not a backend; accepted: cpu, torch, triton"),
        (
            {"QUANTKIT_CPU_ISA": "sse9"},
            "QUANTKIT_CPU_ISA='sse9' is not a level; accepted: portable, avx2, avx512, avx512_bf16",
        ),
    ],
)
def test_unknown_settings_are_refused(settings: dict[str, str], message: str) -> None:
    if "QUANTKIT_CPU_ISA" in settings and not native_levels():
        pytest.skip("the native library was not built")
    done = run("import quantkit_kernels as k; print(k.describe()['problem']); k.backend()", **settings)
    assert message in done.stdout
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1] == f"ValueError: {message}"


def test_triton_forced_where_it_is_missing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('imported')")  # installed, but there is no device
    hidden = {"CUDA_VISIBLE_DEVICES": "", "QUANTKIT_KERNELS": "triton", "TRITON_INTERPRET": "0"}
    done = run(f"import sys; sys.path.append({str(tmp_path)!r})\n{CHOOSE}", **hidden)
    why = "QUANTKIT_KERNELS=triton, but no CUDA device was found"
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1].startswith(f"ValueError: {why}")


@needs_native
def test_backends_are_described_without_torch() -> None:
    code = "import json, sys, quantkit_kernels as k; print(json.dumps([k.describe(), 'torch' in sys.modules]))"
    found, has_torch = json.loads(run(code).stdout)
    cpu = found["backends"]["cpu"]
    assert not has_torch and cpu["why_not"] is None
    assert cpu["levels"] == list(native_levels()) and cpu["level"] == cpu["levels"][-1]
    assert cpu["openmp"] is None or "/" not in cpu["openmp"]
    assert cpu["threads"] == 1  # OMP_NUM_THREADS of ``run``


def test_native_forced_where_it_is_missing_is_an_error(tmp_path: Path) -> None:
    done = run(REPORT, copy_without_library(tmp_path), QUANTKIT_KERNELS="cpu")
    assert done.returncode == 1 and "ValueError: QUANTKIT_KERNELS=cpu, but the native library" in done.stderr


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no compiler to build the native library")
def test_where_there_is_a_compiler_the_library_was_built() -> None:
    """Else the comparisons of native code with the twin would be left out without a word."""
    assert native_levels()


def test_importing_loads_neither_torch_nor_the_library() -> None:
    code = "import sys, quantkit_kernels.registry as r; print('torch' in sys.modules, r._chosen)"
    assert run(code).stdout.split() == ["False", "None"]


def test_a_build_without_a_compiler_succeeds_and_says_so(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path / "lib")]
    command += ["--build-temp", str(tmp_path / "temp")]
    no_compiler = os.environ | {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
    done = subprocess.run(command, cwd=ROOT, env=no_compiler, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "libquantkit_kernels" in done.stderr and "failed" in done.stderr
    assert not list(tmp_path.rglob("*.so"))
