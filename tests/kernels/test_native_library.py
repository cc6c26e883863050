"""The native library as a file and as a guest: incomplete builds and files, threads, forks."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit_kernels import library

from .backends import native_levels
from .test_registry import CHOOSE, PACKAGE, copy_without_library, needs_native, run

CSRC = Path(__file__).resolve().parents[2] / "kernels" / "csrc"
STUBS = {
    "ops": ("QkOps", "portable avx2 avx512"),
    "cache": ("QkCacheOps", "portable avx2 avx512"),
    "rows": ("QkRowOps", "portable avx2 avx512"),
    "matmul": ("QkMatmulOps", "portable avx2 avx512 avx512_bf16"),
    "attention": ("QkAttentionOps", "portable avx2 avx512 avx512_bf16"),
}


@needs_native
@pytest.mark.parametrize("tenths", [1, 5, 9])
def test_a_library_that_was_cut_off_is_explained(tmp_path: Path, tenths: int) -> None:
    """Loading it would end the process: the loader maps what the header promises."""
    package = copy_without_library(tmp_path)
    whole = (PACKAGE / library.LIBRARY_NAME).read_bytes()
    (package / "quantkit_kernels" / library.LIBRARY_NAME).write_bytes(whole[: len(whole) * tenths // 10])
    done = run(CHOOSE, package)
    assert done.returncode == 0, done.stderr
    info, said, _ = json.loads(done.stdout)
    assert info["name"] == "torch" and "incomplete" in info["why_not_cpu"] and len(said) == 1


@needs_native
def test_only_the_library_itself_is_loaded(tmp_path: Path) -> None:
    package = copy_without_library(tmp_path) / "quantkit_kernels"
    shutil.copy(PACKAGE / library.LIBRARY_NAME, package)
    (package / "libquantkit_kernels.bak").write_bytes(b"not a library")
    info, said, _ = json.loads(run(CHOOSE, tmp_path).stdout)
    assert info["name"] == "cpu" and info["library"] == library.LIBRARY_NAME and not said


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no compiler")
@pytest.mark.parametrize(
    ("left_out", "missing"),
    [
        ("", set()),
        ("matmul_avx512_bf16", {3}),
        ("attention_avx512_bf16", {3}),
        ("cache_avx2", {1}),
        ("rows_avx512", {2, 3}),
        ("attention_avx512", {2, 3}),
    ],
)
def test_a_level_is_offered_only_if_all_of_it_was_built(tmp_path: Path, left_out: str, missing: set[int]) -> None:
    """An old compiler leaves out single sources (setup.py); a call into one of them would do nothing."""
    lines = [f'#include "{header}.h"' for header in ("attention", "matmul", "rows")]
    for area, (kind, levels) in STUBS.items():
        lines.append(f"static const {kind} some_{area}{{}};")
        for level in levels.split():
            value = "nullptr" if f"{area}_{level}" == left_out else f"&some_{area}"
            lines.append(f'extern "C" const {kind}* qk_{area}_{level}() {{ return {value}; }}')
    (tmp_path / "stubs.cpp").write_text("\n".join(lines))
    built = tmp_path / "dispatch.so"
    command = ["c++", "-std=c++17", "-shared", "-fPIC", f"-I{CSRC}", "-o", str(built)]
    subprocess.run([*command, str(CSRC / "dispatch.cpp"), str(tmp_path / "stubs.cpp")], check=True)
    handle = ctypes.CDLL(str(built))
    assert {level for level in range(4) if handle.qk_isa_state(level) == -1} == missing


@needs_native
def test_signatures_are_set_once() -> None:
    """ctypes reads them without a lock while another thread may call."""
    loaded = library.Library.load()
    loaded.declare({"qk_bf16_to_float32": [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]})
    before = loaded.handle.qk_bf16_to_float32.argtypes
    loaded.declare({"qk_bf16_to_float32": [ctypes.c_void_p]})
    assert loaded.handle.qk_bf16_to_float32.argtypes == before


FORK = """
import os, signal, torch
from quantkit_kernels.forward.mla import mla_decode
from quantkit_kernels.forward.pages import MlaLayout
torch.set_num_threads(2)
layout = MlaLayout(16)
pages = layout.allocate(64)
table, lengths = torch.arange(64, dtype=torch.int32)[None], torch.tensor([1024], dtype=torch.int32)
latent, rope = torch.ones(1, 4, 512).bfloat16(), torch.ones(1, 4, 64).bfloat16()
call = lambda: mla_decode(latent, rope, pages, layout, table, lengths, scale=0.1)
wanted = call()
child = os.fork()
if not child:
    signal.alarm(60)
    same = torch.equal(call(), wanted)
    os._exit(0 if same else 1)
status = os.waitpid(child, 0)[1]
print(status, torch.equal(call(), wanted))
"""


@needs_native
def test_a_child_of_a_fork_does_not_wait_for_threads_that_are_gone() -> None:
    done = run(FORK, QUANTKIT_KERNELS="cpu")
    assert done.stdout.split() == ["0", "True"], done.stderr


@needs_native
def test_statuses_that_no_check_foresaw_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from quantkit_kernels.forward import choice
    from quantkit_kernels.forward.cache import copy_pages, gather_index_keys
    from quantkit_kernels.forward.linear import int4_linear
    from quantkit_kernels.forward.pages import IndexLayout
    from quantkit_kernels.forward.weights import Int4Weight

    unknown = library.Library.load(native_levels()[0])
    unknown.level = 99  # of which there are no functions: they do nothing and say so
    monkeypatch.setattr(choice, "backend_for", lambda like: "cpu")
    monkeypatch.setattr(choice, "library", lambda: unknown)
    weight = Int4Weight(torch.zeros(8, 8).int(), torch.ones(8, 2).bfloat16())
    with pytest.raises(RuntimeError, match="qk_linear returned 3"):
        int4_linear(torch.ones(1, 64).bfloat16(), weight)
    layout, one = IndexLayout(4), torch.ones(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="qk_cache_gather returned 3"):
        gather_index_keys(layout.allocate(2), layout, one[None], one)
    copy_pages(layout.allocate(2), torch.tensor([0]), torch.tensor([1]))  # the same code at every level


OTHERS_TOO = """
import ctypes, importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import torch
from quantkit_kernels import library, openmp
path = openmp.lend(library.Library.load())
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line.rpartition("/")[2]}
assert len(loaded) > 1, loaded  # or this shows nothing
threads = ctypes.CDLL(path).omp_get_max_threads
for count in (3, 5):
    torch.set_num_threads(count)
    assert threads() == count, (path, threads(), count)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other platforms have no GNU runtime")
@pytest.mark.parametrize("order", [1, -1])
def test_the_runtime_is_torchs_own_whatever_else_is_loaded(order: int) -> None:
    modules = ("torch", "sklearn.utils._openmp_helpers")  # scikit-learn brings a runtime of its own
    done = subprocess.run([sys.executable, "-c", OTHERS_TOO, *modules[::order]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
