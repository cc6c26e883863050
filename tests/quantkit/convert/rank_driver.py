"""``quantkit`` with small batches and one planned accident: ``rank_driver.py ACCIDENT RANK LAYER -- arguments``.

ACCIDENT is ``kill`` (SIGKILL), ``fail`` (a SourceError) or ``none``; it happens when process RANK has begun its
third expert of LAYER. A process that is still there after ``PATIENCE_S`` says where each of its threads is.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from itertools import count
from typing import Any

from quantkit.calibration import stream
from quantkit.cli.main import main
from quantkit.convert import calibrated
from quantkit.errors import SourceError

BATCH_TOKENS = 128
PATIENCE_S = 180  # less than the tests' own


def prepare(accident: str, rank: int, layer: int) -> None:
    real, calls = calibrated.calibrate_expert, count(1)

    def expert(weights: Any, chosen: Any, routed: Any, inputs: Any, gating: Any, where: str, *more: Any) -> Any:
        if f".layers.{layer}." in where and int(os.environ["RANK"]) == rank and next(calls) == 3:
            if accident == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise SourceError("an accident", where=where)
        return real(weights, chosen, routed, inputs, gating, where, *more)

    if accident != "none":
        calibrated.calibrate_expert = expert


if __name__ == "__main__":
    faulthandler.dump_traceback_later(PATIENCE_S)
    stream.BATCH_TOKENS = BATCH_TOKENS
    prepare(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    sys.exit(main(sys.argv[5:]))
