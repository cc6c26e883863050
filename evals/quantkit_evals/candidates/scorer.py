"""Continuations scored by our engine's model, in process: steps are built here, without the server's scheduler.

Two paths. ``prefill``: context and continuation in prefill steps, as scores usually are made. ``decode``: the
context in prefill steps, whose last token gives the distribution of the continuation's first one, as when serving;
then every token of the continuation in a decode step of its own, batched over sequences. Sequences enter in order
of length when others have ended, so that the steps stay full.

Pages are the server's: its pool and prefix index, so beginnings that several contexts share (the choices of a
question, the examples of a few-shot prompt) are computed once. Page tags are off: one thread, no preemption, a
sequence has all its pages before its first step.

Left out: cutting what is too long (``refusal`` says so before), and keeping logits: each step's go to the caller,
who reduces them before the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit_serve.batch import Batch
from quantkit_serve.paging import OutOfPages, PagePool, PrefixIndex
from quantkit_serve.phase import Phase

from ..configuration import Path
from .pair import NotFinite, Pair, Scored, check_vocabulary
from .sequence import Sequence as Scoring
from .sequence import sequences

if TYPE_CHECKING:
    from quantkit_serve.batch import Runner

LOGIT_BYTES = 64 << 20  # of one step
_OWNER = "score {}"


class Row(NamedTuple):
    """A row of a step's logits: the distribution of token ``offset`` of the continuation of a pair."""

    pair: int
    offset: int
    row: int


@dataclass(frozen=True)
class Step:
    """What a step gave.

    Attributes:
        phase: it was of.
        rows: what the logits are for; one row may be for several pairs. Of each pair in order of offsets.
        logits: float32 ``[n, vocab]``.
        num_tokens: that it computed.
    """

    phase: Phase
    rows: list[Row]
    logits: Tensor
    num_tokens: int


@dataclass(frozen=True)
class ScorerLimits:
    """Sizes of steps; figures don't depend on them but by rounding.

    Attributes:
        max_sequences: at once.
        max_tokens: of a prefill step.
    """

    max_sequences: int = 64
    max_tokens: int = 1024


class Scorer:
    """Scores pairs on a runner whose pages nobody else uses meanwhile.

    Args:
        runner: with at least ``num_pages`` pages allocated.
        page_size: of the runner's configuration.
    """

    def __init__(
        self, runner: Runner, *, num_pages: int, page_size: int, limits: ScorerLimits = ScorerLimits()
    ) -> None:
        self._runner, self._page_size, self._limits = runner, page_size, limits
        self.num_pages = num_pages
        self.max_tokens = min(runner.facts.max_model_len, num_pages * page_size)
        self._max_rows = max(LOGIT_BYTES // (4 * runner.facts.vocab_size), limits.max_sequences)

    def refusal(self, pair: Pair) -> str | None:
        """Why a pair can't be scored; None if it can."""
        needed = pair.num_tokens - 1  # the last one is only asked about
        if needed > self._runner.facts.max_model_len:
            return f"{needed} tokens, the model takes {self._runner.facts.max_model_len}"
        if needed > self.max_tokens:
            return f"{needed} tokens, the KV pages hold {self.max_tokens}"
        return None

    def steps(self, pairs: Sequence[Pair], path: Path, *, decoded_context: int = 0) -> Iterator[Step]:
        """Run the pairs; the sequence of steps depends on the pairs and the sizes alone, not on the model.

        Args:
            decoded_context: with ``decode``, so many last tokens of contexts go through decode steps, too.

        Raises:
            ValueError: a pair that ``refusal`` refuses, or an empty side.
            PromptRefused: a token that the model doesn't know.
        """
        for pair in pairs:
            if not pair.context or not pair.continuation:
                raise ValueError("a pair needs a context and a continuation")
            if (why := self.refusal(pair)) is not None:
                raise ValueError(why)
        check_vocabulary(pairs, self._runner.facts.vocab_size)
        waiting = deque(
            sequences(
                pairs, is_forced=path == "decode", decoded_context=decoded_context, page_size=self._page_size
            )
        )
        table = _Table(self._runner, self.num_pages, self._page_size, self._limits, self._max_rows)
        return table.run(waiting)

    def score(
        self, pairs: Sequence[Pair], path: Path, *, decoded_context: int = 0
    ) -> Iterator[tuple[int, Scored]]:
        """(index, score) of each pair, as they are done.

        Raises:
            NotFinite: the model's logits are not numbers.
            PromptRefused: as ``steps``.
        """
        sums = [0.0] * len(pairs)
        greedy = [True] * len(pairs)
        decoded = [0] * len(pairs)
        for step in self.steps(pairs, path, decoded_context=decoded_context):
            targets = [pairs[pair].continuation[offset] for pair, offset, _ in step.rows]
            logprobs, is_top = token_logprobs(step, targets)
            for (pair, offset, _), logprob, top in zip(step.rows, logprobs, is_top, strict=True):
                sums[pair] += logprob
                greedy[pair] = greedy[pair] and top
                decoded[pair] += step.phase is Phase.DECODE
                if offset == len(pairs[pair].continuation) - 1:
                    yield pair, Scored(sums[pair], greedy[pair], decoded[pair])


def token_logprobs(step: Step, targets: Sequence[int]) -> tuple[list[float], list[bool]]:
    """Log-probability of a target for each of ``step.rows``, and whether it is the most likely token.

    Raises:
        NotFinite: a row is not a distribution.
    """
    rows = torch.tensor([row for _, _, row in step.rows], dtype=torch.int64)
    wanted = torch.tensor(targets, dtype=torch.int64)
    found = torch.log_softmax(step.logits, -1)[rows, wanted]  # one pass, where logsumexp takes several
    if not bool(torch.isfinite(found).all()):
        pair, offset, _ = step.rows[int(torch.argmin(torch.isfinite(found).int()))]
        raise NotFinite(pair, offset)
    top = step.logits.argmax(-1)[rows] == wanted
    return found.double().tolist(), top.tolist()


class _Table:
    """Sequences that run, their pages and the rows of the block table."""

    def __init__(
        self, runner: Runner, num_pages: int, page_size: int, limits: ScorerLimits, max_rows: int
    ) -> None:
        self._runner, self._page_size, self._limits, self._max_rows = runner, page_size, limits, max_rows
        self._pool = PagePool(num_pages, is_tagged=False)
        self._index = PrefixIndex(self._pool, page_size)
        entries = -(-min(runner.facts.max_model_len, num_pages * page_size) // page_size)
        self._pages = np.zeros((limits.max_sequences, entries), np.int32)
        self._slots = list(range(limits.max_sequences - 1, -1, -1))
        self._running: list[Scoring] = []

    def run(self, waiting: deque[Scoring]) -> Iterator[Step]:
        while waiting or self._running:
            if len(self._slots) * 4 >= self._limits.max_sequences or not self._running:
                self._admit(waiting)
            filling = [s for s in self._running if not s.is_prefilled]
            if filling:
                yield self._prefill(filling)
            else:
                yield self._decode()
            for sequence in [s for s in self._running if s.is_done]:
                self._leave(sequence)

    def _admit(self, waiting: deque[Scoring]) -> None:
        """Let in what there are pages for. One whose beginning another is about to compute waits for it."""
        coming = {key for s in self._running if not s.is_prefilled for key in s.keys}
        held: list[Scoring] = []
        while waiting and self._slots:
            sequence = waiting.popleft()
            shared = self._index.match(sequence.shareable)
            if len(shared) < len(sequence.keys) and sequence.keys[len(shared)] in coming:
                held.append(sequence)
                if len(held) >= self._limits.max_sequences:
                    break
                continue
            slot = self._slots[-1]
            owner = _OWNER.format(slot)
            count = -(-len(sequence.tokens) // self._page_size)
            self._pool.share(shared, owner)
            try:
                own = self._pool.allocate(count - len(shared), owner)
            except OutOfPages:
                self._pool.release(shared, owner)
                waiting.appendleft(sequence)
                break
            sequence.slot, sequence.refs = self._slots.pop(), shared + own
            sequence.done = len(shared) * self._page_size
            self._pages[slot, :count] = [ref.page for ref in sequence.refs]
            self._running.append(sequence)
            coming.update(sequence.keys)
        waiting.extendleft(reversed(held))

    def _leave(self, sequence: Scoring) -> None:
        self._running.remove(sequence)
        self._pool.release(sequence.refs, _OWNER.format(sequence.slot))
        self._slots.append(sequence.slot)

    def _prefill(self, filling: list[Scoring]) -> Step:
        runs: list[tuple[Scoring, int]] = []
        room, rows = self._limits.max_tokens, self._max_rows
        for sequence in filling:
            count = min(sequence.forced - sequence.done, room)
            asked = max(sequence.done + count - max(sequence.first, sequence.done), 0)
            if asked > rows:  # the logits of so many tokens are more than a step may give
                count -= asked - rows
                asked = rows
            if count < 1:
                break
            runs.append((sequence, count))
            room, rows = room - count, rows - asked
            if not room or not rows:
                break
        step = self._step(Phase.PREFILL, runs)
        for sequence, _ in runs:
            if sequence.is_prefilled:
                self._index.insert(sequence.shareable, "", sequence.refs)
        return step

    def _decode(self) -> Step:
        return self._step(Phase.DECODE, [(sequence, 1) for sequence in self._running])

    def _step(self, phase: Phase, runs: list[tuple[Scoring, int]]) -> Step:
        counts = np.array([count for _, count in runs])
        starts = np.array([sequence.done for sequence, _ in runs])
        ends = starts + counts
        cu_tokens = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        rows: list[Row] = []
        logit_rows: list[int] = []
        for (sequence, count), start, first in zip(runs, starts.tolist(), cu_tokens.tolist(), strict=False):
            for position in range(max(sequence.first, start), start + count):
                offset = position - sequence.first
                rows += [Row(pair, offset, len(logit_rows)) for pair in sequence.pairs]
                logit_rows.append(first + position - start)
        batch = Batch(
            phase=phase,
            token_ids=np.concatenate([s.tokens[s.done : s.done + count] for s, count in runs]),
            positions=_positions(starts, counts, cu_tokens),
            cu_tokens=cu_tokens,
            lengths=ends.astype(np.int32),
            block_table=self._pages[[s.slot for s, _ in runs], : -(-int(ends.max()) // self._page_size)],
            logit_rows=np.array(logit_rows, np.int64),
        )
        logits = self._runner.run(batch)
        for sequence, count in runs:
            sequence.done += count
        return Step(phase, rows, logits, int(cu_tokens[-1]))


def _positions(
    starts: NDArray[np.int64], counts: NDArray[np.int64], cu_tokens: NDArray[np.int32]
) -> NDArray[np.int64]:
    return np.arange(cu_tokens[-1], dtype=np.int64) + np.repeat(starts - cu_tokens[:-1], counts)
