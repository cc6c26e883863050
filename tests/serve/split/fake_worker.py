"""A worker that computes hashes; a folder tells it what to do, and it tells there where it is.

``hold-PHASE``: a step waits in its middle while this exists, having made ``held-PHASE``. ``hold-load-PHASE``: the
same before the model is loaded. ``break-PHASE``: a step raises. ``refuse-PHASE``: loading raises.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import SourceError
from quantkit_serve.batch import Batch, ModelFacts
from quantkit_serve.split.worker import Loaded
from tests.serve.engine.hashes import EOS, PAGE_BYTES, VOCAB, compute

FACTORY = f"{__name__}:open_fake"


class FakeWorker:
    def __init__(self, folder: Path, phase: str, page_size: int, kv_format_id: str) -> None:
        self.folder, self.phase, self.page_size = folder, phase, page_size
        memory = {"shared": 1, "prefill": 1, "decode": 1}
        self.facts = ModelFacts("fake", VOCAB, 1 << 20, PAGE_BYTES, kv_format_id, frozenset({EOS}), memory)

    def allocate(self, memory: NDArray[np.uint8]) -> None:
        self.pages = memory[:, : self.page_size * 8].view(np.uint64)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        assert batch.phase.value == self.phase
        wait(self.folder, self.phase)
        if (self.folder / f"break-{self.phase}").exists():
            raise RuntimeError("broken on purpose")
        return compute(self.pages, batch)


def wait(folder: Path, name: str) -> None:
    if (folder / f"hold-{name}").exists():
        (folder / f"held-{name}").touch()
        while (folder / f"hold-{name}").exists():
            time.sleep(0.002)


def open_fake(
    folder: str, phase: str, page_size: int, kv_format_id: str = "fake", pair_id: str | None = "pair"
) -> Loaded:
    place = Path(folder)
    (place / f"threads-{phase}").write_text(os.environ["OMP_NUM_THREADS"])
    wait(place, f"load-{phase}")
    if (place / f"refuse-{phase}").exists():
        raise SourceError("is refused", where=phase)
    return Loaded(FakeWorker(place, phase, page_size, kv_format_id), pair_id)
