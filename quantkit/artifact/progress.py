"""What a long job (conversion, verification) tells while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """One event: bytes of work done or found done so far, of all there are, and what was being worked on.

    ``stage`` is ``download``, ``sources`` (files being read, hashed and placed), ``weights`` (tensors being
    converted) or ``verify``. A conversion counts a source byte once for its digest and once for its conversion,
    and once more if it has to be downloaded, so that the ratio is honest about the time left.
    """

    stage: str
    unit: str
    done_bytes: int
    total_bytes: int


OnProgress = Callable[[Progress], None]
