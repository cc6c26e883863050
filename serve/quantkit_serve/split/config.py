"""How the two workers of ``--split`` are run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from quantkit.errors import UsageError

from ..phase import Phase

_NAMES = ", ".join(phase.value for phase in Phase)
_FORM = "prefill=N,decode=N with N at least 1"


def default_threads(cores: int | None = None) -> Mapping[Phase, int]:
    """The cores that this process may run on, divided; decode, which every token waits for, gets the odd one's
    smaller half: prefill computes, decode mostly reads memory.

    Args:
        cores: to divide; by default those of this process.
    """
    count = len(os.sched_getaffinity(0)) if cores is None else cores
    decode = max(count // 2, 1)
    return MappingProxyType({Phase.PREFILL: max(count - decode, 1), Phase.DECODE: decode})


def parse_threads(text: str) -> Mapping[Phase, int]:
    """``prefill=2,decode=1``.

    Raises:
        UsageError: anything else.
    """
    found: dict[Phase, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        phase = next((p for p in Phase if p.value == name), None)
        if phase is None or phase in found or not (number.isascii() and number.isdecimal()) or int(number) < 1:
            raise UsageError(f"{text!r} is not understood", where="--split-threads", accepted=_FORM)
        found[phase] = int(number)
    if len(found) != len(Phase):
        raise UsageError(f"{text!r} leaves out one of {_NAMES}", where="--split-threads", accepted=_FORM)
    return MappingProxyType(found)


@dataclass(frozen=True)
class SplitConfig:
    """See the attributes.

    Attributes:
        threads: of each worker.
        step_limit_s: a worker that computes a step for longer is stuck: it is ended and started anew.
        load_limit_s: the same while it loads the model.
        return_limit_s: requests wait so long for a worker that died; then they end with an error, and new ones
            are refused until it is back.
        has_canary: compare the bytes of a request's pages at its hand-off with what prefill left in them.
    """

    threads: Mapping[Phase, int] = field(default_factory=default_threads)
    step_limit_s: float = 120.0
    load_limit_s: float = 600.0
    return_limit_s: float = 60.0
    has_canary: bool = False
