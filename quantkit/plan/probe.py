"""How fast this machine converts, hashes and reads: measured for a moment, so that a time can be estimated.

Three rates decide the time of a conversion, a fourth that of calibration. Each is measured on the real thing (the
chosen kernel with the plan's method, sha256, the source's own file, matrix products) for at most ``seconds``;
nothing is written. What is left out: the network of a Hub source and the target's write rate, which only writing
would tell.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..recipe.sections import CALIBRATED_METHODS, DATA_FREE_METHOD
from .fate import Op

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from .plan import Plan

PROBE_SECONDS = 0.2
_ROWS, _COLUMNS = 256, 2048
_HASH_BYTES = 4 << 20
_READ_BYTES = 4 << 20
_READ_LIMIT = 64 << 20


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of one thread.

    Attributes:
        weights_per_s: converted weights.
        hash_bytes_per_s: sha256.
        read_bytes_per_s: the source's storage, past the page cache where the system allows it; None when no file
            of the source is on disk yet.
        backend: kernels that were measured.
        matmul_flops_per_s: float32 matrix products; None where no method calibrates.
    """

    weights_per_s: float
    hash_bytes_per_s: float
    read_bytes_per_s: float | None
    backend: str
    matmul_flops_per_s: float | None = None


def measure(plan: Plan, checkpoint: Checkpoint, *, seconds: float = PROBE_SECONDS) -> Rates:
    """Measure the rates that matter for a plan; takes about twice ``seconds``.

    Raises:
        EnvironmentProblem: the kernel backend that was asked for is not there.
    """
    import quantkit_kernels as kernels

    job = next((job for shard in plan.shards for job in shard.jobs if job.op is Op.TO_INT4), None)
    group_size, method = (job.group_size or 32, job.method or "rtn") if job else (32, "rtn")
    is_calibrated = method in CALIBRATED_METHODS  # counted in searches of mse, see calibration_time.py
    method = DATA_FREE_METHOD if is_calibrated else method
    codes, scales = _random_tile()

    def convert() -> None:
        kernels.fp8_to_int4(codes, scales, (128, 128), group_size, method)

    convert()  # the first call loads the backend
    weights = _rate(convert, seconds) * _ROWS * _COLUMNS
    data = bytes(_HASH_BYTES)
    hashed = _rate(lambda: hashlib.sha256(data).digest(), seconds / 4) * _HASH_BYTES
    products = _matmul_rate(seconds) if is_calibrated else None
    return Rates(weights, hashed, _read_rate(checkpoint, seconds), kernels.backend().name, products)


def _matmul_rate(seconds: float) -> float:
    """By numpy's library, as torch's takes seconds to import; of one core, whatever number of threads it uses."""
    import numpy as np

    a, b = np.ones((512, 2048), np.float32), np.ones((2048, 1024), np.float32)
    a @ b
    start, used, calls = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - start < seconds:
        a @ b
        calls += 1
    return 2 * a.size * b.shape[1] * calls / (time.process_time() - used)


def _random_tile() -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    # Any code but the two NaNs (0x7F, 0xFF).
    codes = random.integers(0, 127, (_ROWS, _COLUMNS), dtype=np.uint8)
    codes |= random.integers(0, 2, codes.shape, dtype=np.uint8) << np.uint8(7)
    scales = random.uniform(1e-4, 1e-3, (_ROWS // 128, _COLUMNS // 128)).astype(np.float32)
    return codes, scales


def _rate(work: Any, seconds: float) -> float:
    """Calls per second."""
    start, calls = time.perf_counter(), 0
    while True:
        work()
        calls += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return calls / elapsed


def _read_rate(checkpoint: Checkpoint, seconds: float) -> float | None:
    """Bytes per second of reading the largest file of the source, at most 64 MiB of its middle."""
    largest = max(checkpoint.files.values(), key=lambda file: file.nbytes, default=None)
    path = checkpoint.local_path(largest.name) if largest else None
    if largest is None or path is None:
        return None
    return _read_file_rate(path, largest.nbytes, seconds)


def _read_file_rate(path: Path, nbytes: int, seconds: float) -> float | None:
    start_at = max(0, (nbytes - _READ_LIMIT) // 2)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None  # reading it for real will say why
    try:
        # Cached pages would make any disk look like memory; a hint, which memory file systems ignore.
        os.posix_fadvise(handle, start_at, _READ_LIMIT, os.POSIX_FADV_DONTNEED)
        start, done, elapsed = time.perf_counter(), 0, 0.0
        while done < _READ_LIMIT and elapsed < seconds:
            count = len(os.pread(handle, _READ_BYTES, start_at + done))
            elapsed = time.perf_counter() - start
            done += count
            if count == 0:
                break
        return done / elapsed if done else None
    except OSError:
        return None
    finally:
        os.close(handle)
