"""Facts about this installation and machine, read without importing the big packages.

Versions come from the installed metadata: asking torch for its version would take more than a second and
285 MiB. Values that a system doesn't offer are None, never guessed.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "quantkit", "torch", "numpy", "safetensors", "huggingface_hub", "pydantic", "click", "rich",
    "transformers", "compressed-tensors",
)  # fmt: skip
SETTINGS = (
    "QUANTKIT_KERNELS", "QUANTKIT_CPU_ISA", "TRITON_INTERPRET", "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT",
    "HF_HUB_OFFLINE", "HF_HUB_ENABLE_HF_TRANSFER", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NO_COLOR",
)  # fmt: skip
# What the native kernels ask for, as /proc/cpuinfo spells it (x86, then Arm).
_CPU_FLAGS = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "sha_ni", "amx_tile", "amx_bf16", "amx_int8", "asimd", "sve", "bf16", "i8mm",
)  # fmt: skip


def collect() -> dict[str, Any]:
    """Versions, kernels, processor, memory in bytes, disk in bytes and settings, as one JSON-ready dict."""
    return {
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "kernels": _kernels(),
        "cpu": _cpu(),
        "memory": _memory(),
        "disk": {"path": os.getcwd(), "free_bytes": shutil.disk_usage(".").free},  # noqa: PTH109 - a string is wanted
        "hub": {"cache": str(_hub_cache()), "token": _has_token()},
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _kernels() -> dict[str, Any]:
    try:
        import quantkit_kernels

        return dict(quantkit_kernels.describe())
    except Exception as error:  # a bug report is wanted most when the kernels don't load
        return {"name": None, "problem": f"{type(error).__name__}: {error}"}


def _cpu() -> dict[str, Any]:
    info: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            info.setdefault(key.strip(), value.strip())
    except OSError:
        pass  # not Linux: the name below comes from platform
    flags = set(info.get("flags", info.get("Features", "")).split())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": info.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "features": [flag for flag in _CPU_FLAGS if flag in flags],
    }


def _memory() -> dict[str, int | None]:
    fields: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(":")
            fields[key] = int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return {
        "total_bytes": fields.get("MemTotal"),
        "available_bytes": fields.get("MemAvailable"),
        "limit_bytes": _cgroup_limit(),
    }


def _cgroup_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:  # cgroup v1 says "no limit" with a huge number
            return int(text)
    return None


def _hub_cache() -> Path:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()


def _has_token() -> bool:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return any(os.environ.get(n) for n in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")) or (home / "token").exists()
