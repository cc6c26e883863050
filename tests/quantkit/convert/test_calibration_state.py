"""Arrays of a calibration that do not fit into memory."""

from __future__ import annotations

from pathlib import Path

import torch

from quantkit.convert.calibration_state import SpilledArrays


def resident_bytes_of(name: str) -> int:
    """Resident pages of mappings of a file, unlinked or not."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            is_ours = name in line
        elif is_ours and fields[0] == "Rss:":
            total += int(fields[1]) << 10
    return total


def test_arrays_over_the_limit_lie_in_files_and_leave_memory_when_trimmed(tmp_path: Path) -> None:
    arrays = SpilledArrays(tmp_path, 1 << 20)
    small, large = arrays((256, 256), "float32"), arrays((4096, 256), "float32")
    expected = torch.arange(large.numel(), dtype=torch.float32).reshape(large.shape)
    large.copy_(expected)
    small.fill_(3)
    assert resident_bytes_of(str(tmp_path)) == 4 << 20  # the large one only
    arrays.trim()
    assert resident_bytes_of(str(tmp_path)) == 0
    assert torch.equal(large, expected) and bool((small == 3).all())
    assert list(tmp_path.iterdir()) == []  # whatever happens, nothing is left behind
