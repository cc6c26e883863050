"""Which sequences run in the next step, and with which pages; no tensors.

Policy, all of it:

* A step is all-prefill or all-decode. While sequences can decode, ``decode_steps_between_chunks`` decode steps
  come between two prefill steps, and a decode step takes every sequence that can decode; so between two tokens of
  a sequence lie at most one prefill step and one decode step, unless it is preempted.
* A prefill step takes at most ``max_num_batched_tokens`` tokens: sequences in the order of arrival, long prompts
  in chunks. A decode step has one token per sequence; what a preempted sequence replays fits the same budget, one
  token per step if the results must be deterministic.
* Admission is first come, first served: whoever doesn't fit blocks those after it. It gets the pages of all its
  tokens at once, and is admitted only if pages are left for everybody running, itself included, to grow until it
  has generated a page's worth of tokens.
* When a sequence must grow and no page is free, the latest arrival is preempted and goes back to the head of the
  queue. So the running ones are always the earliest arrivals, the earliest of all never waits for another, and the
  room kept at admission lets each admission make progress: no ping-pong.
* Proposed tokens are computed behind a sequence's own where the budget of the step and free pages allow it; nobody
  is preempted for them, and whoever is preempted loses his.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..config import SchedulerConfig
from ..paging import OutOfPages, PagePool, PageRef, PrefixIndex
from ..phase import Phase
from .sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Run:
    """The next ``count`` tokens of a sequence, and proposed ones behind them.

    Only the last token that the sequence has is followed by any.
    """

    sequence: Sequence
    count: int
    drafts: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return self.count + len(self.drafts)


@dataclass(frozen=True)
class Plan:
    """A step."""

    phase: Phase
    runs: tuple[Run, ...]


class Scheduler:
    """Owns the queue and the running sequences; takes pages from the pool and gives them back.

    ``num_preemptions``, ``num_prompt_tokens`` and ``num_cached_tokens`` count since the start, the latter two at
    first admissions.

    Args:
        config: see there.
        pool: pages.
        prefix: None: prompts share nothing.
        page_size: tokens in a page.
        max_logit_rows: prompt tokens of a step whose logits may be asked for.
        is_deterministic: replay one token at a time, so that the bits are those of the first time.
        num_drafts: tokens that are proposed for a sequence at a time, at most.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        prefix: PrefixIndex | None,
        *,
        page_size: int,
        max_logit_rows: int,
        is_deterministic: bool,
        num_drafts: int = 0,
    ) -> None:
        self.config, self.pool, self.prefix = config, pool, prefix
        self.page_size, self.max_logit_rows, self.is_deterministic = page_size, max_logit_rows, is_deterministic
        self.num_drafts = num_drafts
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = self.num_prompt_tokens = self.num_cached_tokens = 0
        self._decodes_due = 0
        self._refused: tuple[object, ...] | None = None

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self, lane: Phase | None = None) -> Plan | None:
        """The next step, its pages allocated; None if nothing can run.

        Args:
            lane: only steps of this phase, which then don't take turns; None: of both.
        """
        if lane is not None:
            runs = self._prefill() if lane is Phase.PREFILL else self._decode()
            return Plan(lane, runs) if runs else None
        can_decode = any(s.phase is Phase.DECODE for s in self.running)
        if not can_decode or self._decodes_due <= 0:
            runs = self._prefill()
            if runs:
                self._decodes_due = self.config.decode_steps_between_chunks
                return Plan(Phase.PREFILL, runs)
        runs = self._decode()
        if runs:
            self._decodes_due -= 1
            return Plan(Phase.DECODE, runs)
        return None

    @property
    def num_startable(self) -> int:
        """Requests that the next steps may admit; none if the head of the queue waits for pages."""
        return 0 if self._refused is not None else max(self.config.max_num_seqs - len(self.running), 0)

    def unservable(self) -> Sequence | None:
        """The head of the queue if it doesn't fit the pool although nothing runs: waiting would never help."""
        return self.waiting[0] if self.waiting and not self.running else None

    def remove(self, sequence: Sequence) -> list[PageRef]:
        """End it, wherever it is; the pages that belong to somebody else by now."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED
        self._refused = None
        return self._release(sequence)

    def computed(self, run: Run, num_accepted: int = 0) -> None:
        """The run's keys and values are in its pages: go on after it, and share full pages of the prompt.

        Args:
            num_accepted: of its drafts; what the others left in pages is written anew before it is read.
        """
        sequence = run.sequence
        sequence.num_computed += run.count + num_accepted
        if self.prefix is None:
            return
        behind = self.prefix.lookahead
        full = min(sequence.num_computed, sequence.num_prompt - behind) // self.page_size
        if full > sequence.num_indexed:
            tokens = sequence.request.prompt[: full * self.page_size + behind]
            self.prefix.insert(tokens, sequence.request.cache_salt, sequence.expected[:full])
            sequence.num_indexed = full

    def _prefill(self) -> tuple[Run, ...]:
        budget, rows = self.config.max_num_batched_tokens, self.max_logit_rows
        runs: list[Run] = []
        queue = deque(s for s in self.running if s.phase is Phase.PREFILL)
        while budget > 0 and rows > 0 and (queue or self._admit()):
            sequence = queue.popleft() if queue else self.running[-1]
            count = min(sequence.num_pending, budget)
            if sequence.has_prompt_logprobs_due:
                count = min(count, rows)
                rows -= count
            runs.append(Run(sequence, count))
            budget -= count
        return tuple(runs)

    def _decode(self) -> tuple[Run, ...]:
        ready = [s for s in self.running if s.num_computed >= s.num_prompt]
        spare = max(self.config.max_num_batched_tokens - len(ready), 0)
        runs: list[Run] = []
        for sequence in ready:
            extra = 0 if self.is_deterministic else min(len(sequence.tokens) - sequence.num_computed - 1, spare)
            if self._grow(sequence, sequence.num_computed + 1 + extra):
                runs.append(Run(sequence, 1 + extra))
                spare -= extra
        return tuple(runs) if self.num_drafts == 0 else self._with_drafts(runs, spare)

    def _with_drafts(self, runs: list[Run], spare: int) -> tuple[Run, ...]:
        """What was proposed behind the runs, as far as budget and pages reach; nobody gives way for it."""
        found = []
        for run in runs:
            sequence = run.sequence
            drafts, end = sequence.drafts[:spare], sequence.num_computed + run.count
            if sequence.is_speculative:
                # if all are accepted, a layer that is applied again writes behind them
                most = min(end + len(drafts) + self.num_drafts - 1, sequence.max_stored)
                missing = self._pages(most) - len(sequence.table)
                if 0 < missing <= self.pool.available():
                    sequence.give(self.pool.allocate(missing, sequence.request_id))
                drafts = drafts[: len(sequence.table) * self.page_size - end]
            found.append(Run(sequence, run.count, tuple(drafts)))
            spare -= len(drafts)
        return tuple(found)

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Room for so many tokens, at the expense of later arrivals if need be; False: it was preempted itself."""
        while sequence.state is State.RUNNING:
            missing = self._pages(tokens) - len(sequence.table)
            if missing <= 0:
                return True
            try:
                sequence.give(self.pool.allocate(missing, sequence.request_id))
            except OutOfPages:
                if not self._make_room():
                    return False
        return False

    def _make_room(self) -> bool:
        """At the expense of the latest arrival; False: not now."""
        self._preempt(self.running[-1])
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.state = State.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)
        self._refused = None

    def _admit(self) -> bool:
        """Move the head of the queue to the running ones, with pages for all its tokens; False: not now."""
        if not self.waiting or len(self.running) >= self.config.max_num_seqs:
            return False
        sequence = self.waiting[0]
        now = (sequence, self.pool.available(), len(self.running), sum(s.num_indexed for s in self.running))
        if now == self._refused:  # nothing has changed since: spare the search for its prefix
            return False
        hits = self._find_prefix(sequence)
        self.pool.share(hits, sequence.request_id)  # first, or making room for the rest could evict them
        missing = self._pages(len(sequence.tokens)) - len(hits)
        room = self._room_to_grow(sequence, len(hits) * self.page_size) if self.running else 0
        if missing + room > self.pool.available():
            self.pool.release(hits, sequence.request_id)
            self._refused = now
            return False
        sequence.give([*hits, *self.pool.allocate(missing, sequence.request_id)])
        sequence.num_indexed = len(hits)
        sequence.num_computed = len(hits) * self.page_size
        if not sequence.num_preemptions:  # coming back is not new
            sequence.num_cached = sequence.num_computed
            self.num_prompt_tokens += sequence.num_prompt
            self.num_cached_tokens += sequence.num_cached
        sequence.state = State.RUNNING
        self.running.append(self.waiting.popleft())
        return True

    def _find_prefix(self, sequence: Sequence) -> list[PageRef]:
        """Pages of equal prompts, never of all of this one: its last token must be computed for its logits."""
        if self.prefix is None or sequence.has_prompt_logprobs_due:  # which need every token's logits
            return []
        prompt = sequence.request.prompt
        return self.prefix.match(prompt[: len(prompt) - 1 + self.prefix.lookahead], sequence.request.cache_salt)

    def _room_to_grow(self, newcomer: Sequence, num_cached: int) -> int:
        """Pages to leave so that nobody is preempted before the newcomer has generated a page's worth of
        tokens."""
        prefilling = [s for s in self.running if s.phase is Phase.PREFILL]
        pending = [(s, s.num_pending) for s in prefilling]
        pending.append((newcomer, newcomer.num_prompt - num_cached))
        ahead = sum(count for _, count in pending)
        rows = sum(count for s, count in pending if s.has_prompt_logprobs_due)
        chunks = -(-ahead // self.config.max_num_batched_tokens) - (-rows // self.max_logit_rows)
        steps = chunks * self.config.decode_steps_between_chunks + newcomer.num_generated + self.page_size
        room = sum(
            max(self._pages(min(len(s.tokens) + steps * self._pace(s), s.max_stored)) - len(s.table), 0)
            for s in self.running
        )
        tokens = len(newcomer.tokens)
        return room + self._pages(min(tokens + self.page_size, newcomer.max_stored)) - self._pages(tokens)

    def _pace(self, sequence: Sequence) -> int:
        """Tokens that a step may give it."""
        return 1 + self.num_drafts if sequence.is_speculative else 1

    def _release(self, sequence: Sequence) -> list[PageRef]:
        return self.pool.release(sequence.take_back(), sequence.request_id)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
