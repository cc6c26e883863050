"""The synchronous core: requests in, one step at a time, outputs out.

A step: schedule (pages are allocated), tag check over the block table, launch, run the model, choose tokens, then
take note of them. The lock is held except while the model computes and tokens are chosen, so that requests come
and go meanwhile: pages of one that is aborted then are quarantined until the step has landed. Nothing is
allocated or freed between check and launch.

Everything that can go wrong with one request ends that request: a page that is not its own any more, logits that
are not numbers, a grammar that can't go on, a deadline. A step that a runner loses (``StepLost``) ends
its requests. What else the model raises ends the engine (``loop``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from ..batch import Batch, Runner, StepLost
from ..config import EngineConfig
from ..paging import Fault, Mismatch, PagePool, PrefixIndex, block_tables
from ..phase import Phase
from ..refusal import Overloaded, Refused
from ..request import FinishReason, Grammar, Output, Request, TokenLogprob
from ..service import Figures
from .answering import Answered, accept_all
from .batching import Rows, build
from .choosing import Chosen, choose
from .counters import Counters
from .grammar import Compiler, GrammarFailed, Matcher
from .injection import Injection
from .intake import Intake
from .limits import Limits, num_pages
from .outputs import mismatch_error, output
from .scheduler import Plan, Scheduler
from .sequence import Sequence
from .speculation import LOOKAHEAD, speculation
from .vocabulary import Vocabulary

LOGIT_BYTES = 64 << 20  # of a prefill step that gives logprobs of the prompt

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Flight:
    """A step that was launched."""

    plan: Plan
    batch: Batch
    rows: list[Rows]
    ticket: int


class Engine:
    """One model, one pool.

    Args:
        runner: computes; the memory of the pool is taken here.
        config: see there.
        vocabulary: of the tokenizer.
        compiler: of grammars; None refuses them.
        fault: for tests (``paging.faults``).
        scribble: overwrites a page, for the faults that do.
        clock: seconds.

    Attributes:
        lanes: steps that may run at the same time, each called by a thread of its own: None is one of any phase.
        lock: of everything here.
        changed: by it, waited for by whoever calls ``step``.

    Raises:
        UsageError: the configuration can't work with this model.
    """

    lanes: tuple[Phase | None, ...] = (None,)
    scheduler_type: type[Scheduler] = Scheduler

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        vocabulary: Vocabulary,
        *,
        compiler: Compiler | None = None,
        fault: Fault | None = None,
        scribble: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts, self.config = runner.facts, config
        self.limits = Limits.of(self.facts, config)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._runner, self._clock = runner, clock
        self._injection = None if fault is None else Injection(fault, scribble or (lambda page: None))
        cache, page_size = config.cache, config.cache.page_size
        self.pool = PagePool(num_pages(self.facts, config), is_tagged=cache.has_tags)
        self._speculation = speculation(
            runner, config.model, page_size=page_size, shares_prompts=cache.has_prefix_cache
        )
        lookahead, num_drafts = (LOOKAHEAD, self._speculation.num_tokens) if self._speculation else (0, 0)
        self.prefix = PrefixIndex(self.pool, page_size, lookahead=lookahead) if cache.has_prefix_cache else None
        self.scheduler = self.scheduler_type(
            config.scheduler,
            self.pool,
            self.prefix,
            page_size=page_size,
            max_logit_rows=max(LOGIT_BYTES // (4 * self.facts.vocab_size), 1),
            is_deterministic=config.model.deterministic,
            num_drafts=num_drafts,
        )
        entries = -(-min(self.limits.max_model_len, self.limits.max_stored) // page_size)
        self.tables = block_tables(self.pool, config.scheduler.max_num_seqs, entries)
        self._sequences: dict[str, Sequence] = {}
        self._intake = Intake(vocabulary, compiler, self._speculation, clock)
        self._counters = Counters(clock())
        runner.allocate(self.pool.num_pages)

    # -- requests

    def check(self, request: Request) -> None:
        """
        Raises:
            Refused: the request can't be served; ``Overloaded``: not now.
        """
        self.limits.check(request)
        with self.lock:
            if request.request_id in self._sequences:
                raise Refused(f"request_id {request.request_id!r} is in use", param="request_id")
            count = len(self.scheduler.waiting) - self.scheduler.num_startable
            if count >= self.config.scheduler.max_waiting:
                raise Overloaded(f"{count} requests are waiting already, beside those that run or are about to")

    def compile(self, grammar: Grammar) -> Matcher:
        """May take a second; needs no lock.

        Raises:
            Refused: see ``Compiler.compile``.
        """
        return self._intake.compile(grammar)

    def add(self, request: Request, matcher: Matcher | None = None) -> None:
        """Queue a request; ``matcher`` if its grammar has been compiled already.

        Raises:
            Refused: see ``check`` and ``compile``.
        """
        self.check(request)
        grammar = request.params.grammar
        if grammar is not None and matcher is None:
            matcher = self.compile(grammar)
        with self.lock:
            self.check(request)  # compiling takes time
            sequence = self._intake.sequence(request, matcher)
            self._sequences[request.request_id] = sequence
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> Output | None:
        """End it; its last output, or None if it has ended."""
        with self.lock:
            sequence = self._sequences.get(request_id)
            if sequence is None:
                return None
            text = sequence.detokenizer.finish()
            return self._end(sequence, Answered(text, FinishReason.ABORT, None))

    def fail_all(self, reason: str) -> list[Output]:
        """End all requests with an error, without touching pages: a step may be under way that never lands."""
        with self.lock:
            ended = [output(s, Answered(finish=FinishReason.ERROR), reason) for s in self._sequences.values()]
            self._counters.finished[FinishReason.ERROR.value] += len(ended)
            self._sequences.clear()
            self.scheduler.waiting.clear()
            self.scheduler.running.clear()
            return ended

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def is_due(self, lane: Phase | None) -> bool:
        """Whether a step of the lane may find something to do."""
        return self.has_work

    def outage(self) -> str | None:
        """What part of it is down, for now."""
        return None

    def close(self) -> None:
        """End what it has besides memory; steps that are under way are lost. Any thread may call it, again too."""
        if self._injection is not None:
            self._injection.end()

    def figures(self) -> Figures:
        with self.lock:
            return self._counters.figures(self.scheduler, self.pool, self.tables, self._speculation)

    # -- a step

    def step(
        self, lane: Phase | None = None, deliver: Callable[[list[Output]], None] = lambda outputs: None
    ) -> list[Output]:
        """Compute the next step of a lane; what is new of every answer that it concerns.

        Args:
            lane: one of ``lanes``.
            deliver: is given the same, by the lock, so that what two lanes say of one answer stays in order.
        """
        start = self._clock()
        with self.lock:
            outputs = self._expire(start)
            flight = self._launch(outputs, lane)
            if flight is None:
                deliver(outputs)
                return outputs
        chosen: list[Chosen] = []
        lost: StepLost | None = None
        try:
            chosen = self._compute(flight)
        except StepLost as error:
            lost = error
        with self.lock:
            self.pool.landed(flight.ticket)
            if lost is None:
                self._counters.step(flight.plan, start, self._clock())
                outputs += self._land(flight, chosen)
            else:
                outputs += self._lose(flight, lost)
            deliver(outputs)
        return outputs

    def _compute(self, flight: Flight) -> list[Chosen]:
        logits = self._runner.run(flight.batch).cpu().numpy()
        chosen = choose(logits, flight.rows, self.facts.eos_token_ids)
        if self._speculation is not None:
            self._speculation.propose(flight.batch, chosen)
        return chosen

    def _expire(self, now: float) -> list[Output]:
        late = [s for s in self._sequences.values() if s.deadline is not None and s.deadline <= now]
        return [
            self._fail(
                s, f"its deadline of {s.request.deadline_s} s has passed, after {s.num_generated} tokens", 504
            )
            for s in late
        ]

    def _launch(self, outputs: list[Output], lane: Phase | None) -> Flight | None:
        """Schedule, check, launch; requests that fail on the way are added to ``outputs``."""
        plan = self.scheduler.schedule(lane)
        if plan is None:
            if (sequence := self.scheduler.unservable()) is not None:
                available = self.pool.available()
                outputs.append(self._fail(sequence, f"the KV cache has {available} pages left, too few for it"))
            return None
        if self._injection is not None:
            self._injection.before(plan, self.pool)
        while plan.runs:
            runs = plan.runs
            table = self.tables.fill([run.sequence.table for run in runs], [run.sequence.expected for run in runs])
            first_of_row = {found.row: found for found in reversed(self.tables.check())}
            if not first_of_row:
                batch, rows = build(plan, table)
                return Flight(plan, batch, rows, self.pool.launch(table, self.tables.counts))
            outputs += [self._fail_mismatch(runs[row].sequence, found) for row, found in first_of_row.items()]
            plan = Plan(plan.phase, tuple(run for row, run in enumerate(runs) if row not in first_of_row))
        return None

    def _land(self, flight: Flight, chosen: list[Chosen]) -> list[Output]:
        """A step is done."""
        return [output for one in chosen if (output := self._take(one)) is not None]

    def _lose(self, flight: Flight, lost: StepLost) -> list[Output]:
        """A step will never be done."""
        sequences = [run.sequence for run in flight.plan.runs]
        return [self._fail(s, f"its step was lost: {lost}") for s in sequences if self._is_current(s)]

    def _is_current(self, sequence: Sequence) -> bool:
        """Not if it was aborted while its step ran."""
        return self._sequences.get(sequence.request_id) is sequence

    def _take(self, chosen: Chosen) -> Output | None:
        """What a run of the step means for its request."""
        run = chosen.rows.run
        sequence = run.sequence
        if not self._is_current(sequence):
            return None
        if chosen.error is not None:
            return self._fail(sequence, chosen.error, chosen.error_status)
        num_accepted = max(len(chosen.tokens) - 1, 0)
        if self._speculation is not None:
            self._speculation.verified(run, num_accepted)
        self.scheduler.computed(run, num_accepted)
        sequence.prompt_logprobs += chosen.prompt_logprobs
        sequence.drafts = chosen.drafts
        if chosen.tokens:
            try:
                answered, count = accept_all(sequence, chosen.tokens, self.facts.eos_token_ids)
            except GrammarFailed as failed:
                return self._fail(sequence, str(failed), 400)
            self._counters.generated_tokens += count
            tokens, found = chosen.tokens[:count], chosen.logprobs[:count]
            if answered.finish is not None:
                return self._end(sequence, answered, tokens=tokens, logprobs=found)
            return output(sequence, answered, tokens=tokens, logprobs=found)
        if sequence.request.params.max_tokens == 0 and sequence.num_computed == sequence.num_prompt:
            return self._end(sequence, Answered(finish=FinishReason.LENGTH))
        return None

    # -- ends

    def _fail(self, sequence: Sequence, error: str, status: int = 500) -> Output:
        text = sequence.detokenizer.finish()
        _log.warning("request %s ended with an error: %s", sequence.request_id, error)
        return replace(self._end(sequence, Answered(text, FinishReason.ERROR), error), error_status=status)

    def _fail_mismatch(self, sequence: Sequence, found: Mismatch) -> Output:
        error, holders = mismatch_error(found), ", ".join(found.holders) or "nobody"
        _log.error("request %s: %s; page %d is now of %s", sequence.request_id, error, found.page, holders)
        return self._fail(sequence, error)

    def _end(
        self,
        sequence: Sequence,
        answered: Answered,
        error: str | None = None,
        *,
        tokens: SequenceOf[int] = (),
        logprobs: SequenceOf[TokenLogprob] = (),
    ) -> Output:
        assert answered.finish is not None
        self.scheduler.remove(sequence)  # what is left alone, the pool's audit has
        del self._sequences[sequence.request_id]
        self._counters.finished[answered.finish.value] += 1
        return output(sequence, answered, error, tokens=tokens, logprobs=logprobs)
