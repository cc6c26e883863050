"""The two phases of a request's life. The phase of a step picks the weight set that computes it."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """PREFILL runs on FP8 weights, DECODE on INT4 weights (of a dual artifact)."""

    PREFILL = "prefill"
    DECODE = "decode"
