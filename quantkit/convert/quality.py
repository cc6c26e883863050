"""The quality budget during a conversion: retries of single weights, verdicts on layers, amendments of the plan.

A layer is judged once, when all of its limited weights are done, by their recorded errors alone: number and order
of workers have no say. Until then its files are held back (``ShardState.is_held``), so that a file of a layer that
is planned anew never stands under its final name. An amendment is one line in the journal, written before the old
files go; what the journal says of the layer before that line counts no more. A verdict without an amendment needs
no line, because it follows from what is journalled.

The identity of the conversion (``plan_id``) stays that of the plan without amendments.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..artifact.amendment import Amendment, judge_layer
from ..artifact.journal import Entry, Journal
from ..artifact.shard import ShardWriter
from ..errors import ArtifactError, GateFailed
from ..plan.build import build_plan
from ..plan.fate import Job, Shard
from .ops import JobContext, JobResult, run_job

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..plan import Plan

KIND = "amendment"  # of a journal line


class QualityBudget:
    """The budget of one conversion; without one in the recipe it holds nothing and judges nothing.

    Attributes:
        plan: as amended so far.
        amendments: by layer.

    Args:
        plan: without amendments; those of earlier runs are taken from the journal.
    """

    def __init__(self, plan: Plan, checkpoint: Checkpoint, journal: Journal) -> None:
        self.amendments = {e["layer"]: _amendment(e, journal) for e in journal.entries if e["kind"] == KIND}
        self._original, self._checkpoint, self._journal = plan, checkpoint, journal
        self.plan = self._amended(frozenset(self.amendments)) if self.amendments else plan
        self._limits: dict[int, dict[str, float]] = defaultdict(dict)
        for name, limit in plan.limits.items():
            if (layer := plan.fates[name].layer) is not None:
                self._limits[layer][name] = limit
        self._open = self._limits.keys() - self.amendments.keys()
        self._lock, self._amending = threading.Lock(), threading.Lock()

    def holds(self, shard: Shard) -> bool:
        """Whether this file waits for a verdict."""
        return shard.view != "prefill" and shard.layer in self._open

    def open_layers(self) -> list[int]:
        """Layers without a verdict, sorted."""
        return sorted(self._open)

    def is_known(self, layer: int, done: Mapping[str, JobResult]) -> bool:
        """Whether all limited weights of a layer are among the results (by first source tensor)."""
        return self._limits[layer].keys() <= done.keys()

    def limit(self, job: Job) -> float | None:
        return self._original.limits.get(job.sources[0])

    @property
    def retries(self) -> bool:
        budget = self._original.recipe.budget
        return budget is not None and budget.retries

    def run(self, job: Job, context: JobContext, writer: ShardWriter) -> JobResult:
        """``run_job``, and by ``mse`` where ``rtn`` is over the limit and the recipe asks for a retry."""
        result = run_job(job, context, writer)
        limit, error = self.limit(job), result.relative_error
        if limit is None or error is None or error <= limit or not self.retries or job.method != "rtn":
            return result
        again = replace(context, on_bytes=lambda count: context.on_bytes(0))  # counted already
        return replace(run_job(replace(job, method="mse"), again, writer), method="mse")

    def claim(self, layer: int) -> bool:
        """Whether the caller is to judge this layer: once for each layer that waits."""
        with self._lock:
            if layer not in self._open:
                return False
            self._open.discard(layer)
            return True

    def judge(self, layer: int, done: Mapping[str, JobResult]) -> Amendment | None:
        """The amendment that the results call for.

        Raises:
            GateFailed: a weight is over its limit and the recipe keeps no layer.
        """
        limits = self._limits[layer]
        errors = {name: done[name].relative_error or 0.0 for name in limits}
        found = judge_layer(layer, errors, limits)
        budget = self._original.recipe.budget
        if found is None or (budget is not None and budget.keeps):
            return found
        raise GateFailed(
            f"relative error {found.worst.relative_error:g} is over its limit {found.worst.limit:g} "
            f"({found.over_limit:,} of {found.weights:,} weights of layer {layer} are over theirs"
            f"{', after retries' if self.retries else ''})", where=found.worst.tensor,
            hint=_hint(self.retries, self._journal),
        )  # fmt: skip

    def amend(self, amendment: Amendment, files: Sequence[str]) -> tuple[Shard, ...]:
        """Amend the plan and journal it; one layer at a time.

        Args:
            files: of the layer until now, as the journal calls them.

        Returns:
            The layer's files from now on.

        Raises:
            GateFailed: nothing would be left that is quantized; nothing was journalled then.
        """
        with self._amending:
            plan = self._amended(frozenset({*self.amendments, amendment.layer}))
            self._journal.append({"kind": KIND, **amendment.to_json(), "files": list(files)})
            self.amendments[amendment.layer] = amendment
            self.plan = plan
            return tuple(shard for shard in plan.decode if shard.layer == amendment.layer)

    def _amended(self, layers: frozenset[int]) -> Plan:
        return build_plan(self._checkpoint, self._original.recipe, kept_layers=layers)


def without_amended(entries: Iterable[Entry]) -> tuple[dict[str, list[Entry]], set[str]]:
    """What the journal says of each file, and the files that an amendment took away.

    Lines about a layer's files count only from its amendment on.
    """
    by_file: dict[str, list[Entry]] = defaultdict(list)
    removed: set[str] = set()
    for entry in entries:
        if entry["kind"] in ("jobs", "shard"):
            by_file[entry["shard"]].append(entry)
        elif entry["kind"] == KIND:
            removed.update(entry["files"])
            for file in entry["files"]:
                by_file.pop(file, None)
    return by_file, removed


def _amendment(entry: Entry, journal: Journal) -> Amendment:
    try:
        return Amendment.model_validate({k: v for k, v in entry.items() if k not in ("kind", "files")})
    except ValueError as problem:
        raise ArtifactError(
            "holds an amendment that cannot be read", where=str(journal.path),
            hint="Delete the directory to start afresh",
        ) from problem  # fmt: skip


def _hint(retried: bool, journal: Journal) -> str:
    ways = "raise budget.max_relative_error, add keep-fp8 to budget.action"
    if not retried:
        ways += ", or let it retry"
    return (
        f"For another conversion {ways}, or choose a smaller group size; what is done stays in "
        f"{journal.path.parent} until you delete it"
    )
