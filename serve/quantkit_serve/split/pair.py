"""Both workers and the memory of the pool: a ``batch.Runner`` whose phases are computed by different processes.

Workers that read each other's pages must mean the same by a page: ``kv_format_id`` says so. That they have the
same pair of weights, ``pair_id`` says. Both are compared whenever a worker has started, the first time and after
it died, since the artifact may have been replaced meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import ArtifactError, EnvironmentProblem, UsageError

from ..batch import Batch, ModelFacts
from ..config import EngineConfig
from ..phase import Phase
from .config import SplitConfig
from .memory import SharedMemory
from .process import Identity, Opening, WorkerFailed
from .remote_runner import RemoteRunner

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "quantkit_serve.split.load:open_model"


class Pair:
    """See the module; started by the constructor.

    Args:
        openings: what each worker opens.
        config: of the workers.

    Attributes:
        facts: of the model.
        runners: of each phase.
        on_change: called, by any thread, when a worker has come or gone.

    Raises:
        ArtifactError: the workers don't fit together.
        QuantkitError: one of them can't open what it should.
        EnvironmentProblem: one of them died.
    """

    facts: ModelFacts

    def __init__(self, openings: Mapping[Phase, Opening], config: SplitConfig) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._first: tuple[Phase, Identity] | None = None
        self._comparing = threading.Lock()
        self._pool = SharedMemory.create("pool")
        self._pages = np.zeros((0, 0), np.uint8)
        self.runners = {
            phase: RemoteRunner(
                phase,
                openings[phase],
                config.threads[phase],
                self._pool,
                step_limit_s=config.step_limit_s,
                load_limit_s=config.load_limit_s,
                accept=self._compare,
                on_change=lambda: self.on_change(),
            )
            for phase in Phase
        }
        try:
            for runner in self.runners.values():
                runner.begin()
            for runner in self.runners.values():
                runner.started()
        except WorkerFailed as error:
            self.close()
            raise EnvironmentProblem(str(error), where="--split", hint="Its messages are above.") from error
        except BaseException:
            self.close()
            raise
        assert self._first is not None
        self.facts = self._first[1].facts

    @property
    def memory(self) -> NDArray[np.uint8]:
        """uint8 ``[num_pages, page_bytes]``, of all pages as the workers see them."""
        return self._pages

    def allocate(self, num_pages: int) -> None:
        """As ``batch.Runner``.

        Raises:
            EnvironmentProblem: there is no such memory.
        """
        nbytes = num_pages * self.facts.page_bytes
        self._pool.resize(nbytes)
        self._pool.seal()
        self._pages = self._pool.map(nbytes).reshape(num_pages, self.facts.page_bytes)
        for runner in self.runners.values():
            runner.num_pages = num_pages

    def run(self, batch: Batch) -> Tensor:
        """As ``batch.Runner``, one step of each phase at a time; valid until the next of that phase.

        Raises:
            StepLost: with its worker.
        """
        import torch

        return torch.from_numpy(self.runners[batch.phase].run(batch))

    def scribble(self, page: int) -> None:
        """Overwrite a page in every layer, for faults that do."""
        self._pages[page] = 0xA5

    def close(self) -> None:
        """End both workers."""
        for runner in self.runners.values():
            runner.close()
        self._pool.close()

    def _compare(self, phase: Phase, found: Identity) -> None:
        with self._comparing:
            if self._first is None:
                self._first = (phase, found)
                return
        other, first = self._first
        for name, mine, theirs in (
            ("kv_format_id", found.facts.kv_format_id, first.facts.kv_format_id),
            ("pair_id", found.pair_id, first.pair_id),
            ("model", _sizes(found.facts), _sizes(first.facts)),
        ):
            if mine != theirs:
                raise ArtifactError(
                    f"the {phase.value} worker has {name} {_short(mine)}, but the {other.value} worker started "
                    f"with {_short(theirs)}",
                    where="--split",
                    accepted="workers of one artifact with one KV format",
                    hint="Was the artifact replaced, or are two versions of quantkit installed?",
                )


def open_pair(
    source: str | PathLike[str], config: EngineConfig, split: SplitConfig, name: str | None = None
) -> Pair:
    """The workers of an artifact or checkpoint, loaded; the page pool is yet to be allocated.

    Args:
        name: what /v1/models says; by default the last part of the path.

    Raises:
        UsageError: tokens are to be proposed; the hidden states that it takes stay in the worker of a step.
        QuantkitError: see ``Pair``.
    """
    if config.model.speculative != "off":
        raise UsageError(
            "tokens are proposed in one process only", where="--speculative", accepted="off, with --split"
        )
    opening = Opening(MODEL, {"source": str(source), "name": name, "config": asdict(config)})
    return Pair(dict.fromkeys(Phase, opening), split)


def _sizes(facts: ModelFacts) -> tuple[object, ...]:
    return facts.vocab_size, facts.max_model_len, facts.page_bytes, sorted(facts.eos_token_ids)


def _short(value: object) -> str:
    return repr(value[:16]) if isinstance(value, str) else repr(value)
