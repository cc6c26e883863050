"""Which kinds of steps are worth a recording, and their recordings within a bound of memory.

Recording a step costs what two or three repetitions save (measured with tiny-glm: 5 to 8 ms and 3 ms, for 1 as
for 64 tokens). So a kind is recorded when it has come ``FIRST`` times: doing without has cost as much by then.
Where kinds change all the time, recordings make room for others before they have paid, and such a kind has to come
twice as often the next time.

Legend: T tokens of a step.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

MOST_BYTES = 128 << 20  # of all recordings
FIRST = 3  # steps of a kind until one is recorded
_PAYS = 3  # repetitions
_MOST_KINDS = 256  # that are remembered

Recording = TypeVar("Recording")


class Kind(NamedTuple):
    """Steps that have the same operations on the same shapes in the same pool.

    Attributes:
        tokens: T.
        reach: tokens of the longest context that there is room for: a power of two.
        is_sparse: some context is longer than what the indexer chooses.
        threads: torch's number of them.
        pool: address of the first layer's pages.
    """

    tokens: int
    reach: int
    is_sparse: bool
    threads: int
    pool: int


@dataclass
class _Known(Generic[Recording]):
    """A kind: its steps since it was last without a recording, and how many it takes; its recording."""

    wanted: int
    steps: int = 0
    recording: Recording | None = None
    nbytes: int = 0
    repeated: int = 0
    refusal: str | None = None


class Recordings(Generic[Recording]):
    """See the module.

    Attributes:
        nbytes: memory of all recordings.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._known: OrderedDict[Kind, _Known[Recording]] = OrderedDict()  # the one seen last at the end
        self._too_large: dict[tuple[int, bool], int] = {}  # by reach and sparsity the least T

    def find(self, kind: Kind) -> Recording | None:
        """The recording, to be repeated, if there is one."""
        known = self._known.get(kind)
        if known is None or known.recording is None:
            return None
        self._known.move_to_end(kind)
        known.repeated += 1
        return known.recording

    def wants(self, kind: Kind) -> bool:
        """A step of a kind without a recording: whether it should be recorded."""
        known = self._known.setdefault(kind, _Known(FIRST))
        self._known.move_to_end(kind)
        if len(self._known) > _MOST_KINDS:
            self.nbytes -= self._known.popitem(last=False)[1].nbytes
        known.steps += 1
        # what a step keeps grows with T
        is_too_large = kind.tokens >= self._too_large.get((kind.reach, kind.is_sparse), kind.tokens + 1)
        return known.refusal is None and not is_too_large and known.steps >= known.wanted

    def put(self, kind: Kind, recording: Recording, nbytes: int) -> None:
        """Keep what ``wants`` asked for; others make room, those used longest ago first."""
        known = self._known[kind]
        known.recording, known.nbytes, known.repeated = recording, nbytes, 0
        self.nbytes += nbytes
        for other in list(self._known.values()):
            if self.nbytes <= MOST_BYTES:
                break
            if other is not known and other.recording is not None:
                self._drop(other)

    def refuse(self, kind: Kind, reason: str, *, is_too_large: bool = False) -> None:
        """No step of this kind can be recorded; if it is too large, none of more tokens either."""
        self._known[kind].refusal = reason
        if is_too_large:
            limits = kind.reach, kind.is_sparse
            self._too_large[limits] = min(kind.tokens, self._too_large.get(limits, kind.tokens))

    def refusal(self, kind: Kind) -> str | None:
        """Why there is no recording; None also where there may be one yet."""
        known = self._known.get(kind)
        return None if known is None else known.refusal

    def _drop(self, known: _Known[Recording]) -> None:
        self.nbytes -= known.nbytes
        if known.repeated < _PAYS:
            known.wanted *= 2
        known.recording, known.nbytes, known.steps = None, 0, 0
