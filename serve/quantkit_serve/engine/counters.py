"""What the engine counts, and the snapshot of it that metrics and the live page read."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from ..paging import BlockTables, PagePool
from ..phase import Phase
from ..request import FinishReason
from ..service import Figures, SpeculationFigures
from .scheduler import Plan, Scheduler
from .speculation import Speculation

NUM_STEPS_KEPT = 512
NUM_FINDINGS_SHOWN = 32


@dataclass
class Counters:
    """Since the start; see ``Figures``."""

    start: float
    generated_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    finished: Counter[str] = field(default_factory=lambda: Counter({reason.value: 0 for reason in FinishReason}))
    steps: deque[tuple[float, float, str, int, int]] = field(default_factory=lambda: deque(maxlen=NUM_STEPS_KEPT))

    def step(self, plan: Plan, start: float, end: float) -> None:
        """A step is done."""
        tokens = sum(run.size for run in plan.runs)
        if plan.phase is Phase.PREFILL:
            self.prefill_steps += 1
        else:
            self.decode_steps += 1
        self.steps.append((start - self.start, end - start, plan.phase.value, len(plan.runs), tokens))

    def figures(
        self, scheduler: Scheduler, pool: PagePool, tables: BlockTables, speculation: Speculation | None
    ) -> Figures:
        counts = pool.counts()
        drafts = SpeculationFigures()
        if speculation is not None:
            drafts = SpeculationFigures(
                speculation.num_drafts, speculation.num_draft_tokens, speculation.num_accepted_tokens,
                speculation.num_left_out,
            )  # fmt: skip
        return Figures(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_pages=pool.num_pages,
            num_pages_used=counts.used,
            num_pages_cached=counts.cached,
            num_pages_quarantined=counts.quarantined,
            prompt_tokens=scheduler.num_prompt_tokens,
            generated_tokens=self.generated_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            preemptions=scheduler.num_preemptions,
            prefill_steps=self.prefill_steps,
            decode_steps=self.decode_steps,
            kv_tag_checks=tables.num_checks,
            kv_tag_mismatches=tables.num_mismatches + pool.audit.counts["prefix"],
            speculation=drafts,
            finished=dict(self.finished),
            pages=pool.page_map(),
            steps=tuple(self.steps),
            findings=tuple(
                (f.where, f.page, f.owner, f.holders) for f in [*pool.audit.findings][-NUM_FINDINGS_SHOWN:]
            ),
        )
