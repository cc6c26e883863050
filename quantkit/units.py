"""Byte sizes as people write and read them; GB (10^9) and GiB (2^30) are never mixed up.

A hub shows GB, a GPU is sold in "GB" and has GiB, and the two differ by 7 %: enough to decide whether a model
fits. So a size is always parsed with its unit spelled out, and ``G`` or ``g`` alone, which both camps use, is
refused with the two readings. Bytes are exact integers inside quantkit; these functions stand at its edges.
"""

from __future__ import annotations

import re
from decimal import Decimal

from .errors import UsageError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12

_FACTORS = {
    "": 1, "b": 1,
    "kb": KB, "mb": MB, "gb": GB, "tb": TB,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*", re.ASCII)
_ACCEPTED = (
    "a positive number with a unit: B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)"
)


def parse_bytes(text: str | int, *, where: str | None = None) -> int:
    """Bytes of ``"140GiB"``, ``"1.5 GB"``, ``"4096"`` or an int (both plain numbers are bytes); case is ignored.

    Fractions of a byte are rounded down.

    Args:
        where: the option or recipe key, for the message.

    Raises:
        UsageError: not a size, less than one byte, or a unit that could mean two things (``G``).
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise UsageError(f"{text!r} is not a size", where=where, accepted=_ACCEPTED)
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise UsageError(f"{text!r} is not a size", where=where, accepted=_ACCEPTED)
    number, unit = Decimal(match[1]), match[2].lower()
    if unit in ("k", "m", "g", "t"):
        big = unit.upper()
        raise UsageError(
            f"{text!r} does not say which unit", where=where,
            accepted=f"{match[1]}{big}B (powers of 1000) or {match[1]}{big}iB (powers of 1024)",
        )  # fmt: skip
    if unit not in _FACTORS:
        raise UsageError(f"{text!r} has the unknown unit {match[2]!r}", where=where, accepted=_ACCEPTED)
    nbytes = int(number * _FACTORS[unit])
    if nbytes < 1:
        raise UsageError(f"{text!r} is less than one byte", where=where, accepted=_ACCEPTED)
    return nbytes


def format_gib(nbytes: int) -> str:
    """A size in binary units, for memory: ``703.72 GiB``, ``285.0 MiB``, ``512 B``."""
    return _format(nbytes, ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")))


def format_gb(nbytes: int) -> str:
    """A size in decimal units, as hubs and disks state it: ``755.62 GB``."""
    return _format(nbytes, ((TB, "TB"), (GB, "GB"), (MB, "MB"), (KB, "kB")))


def format_bytes(nbytes: int) -> str:
    """Both readings, so that nobody has to guess: ``755.62 GB (703.72 GiB)``."""
    return f"{format_gb(nbytes)} ({format_gib(nbytes)})" if abs(nbytes) >= KB else f"{nbytes} B"


def _format(nbytes: int, steps: tuple[tuple[int, str], ...]) -> str:
    # Tera is skipped below 10 of it: model sizes are compared in giga, and 1029.17 GB reads next to 755.62 GB.
    for factor, unit in steps:
        enough = 10 * factor if factor >= TB else factor
        if abs(nbytes) >= enough:
            digits = 2 if factor >= GB else 1
            return f"{nbytes / factor:.{digits}f} {unit}"
    return f"{nbytes} B"


def format_seconds(seconds: float) -> str:
    """A duration with two figures of meaning: ``0.4 s``, ``42 s``, ``6 min``, ``2 h 05 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"
