"""The plan: one frozen object that says what a conversion does with every tensor.

``build_plan`` makes it, conversion executes it, the manifest records it, verification checks against it; no stage
decides again what an earlier stage decided.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..recipe.recipe import Recipe
from .fate import Action, Fate, Job, Op, Shard
from .sizes import DiskNeed, Sizes

PLAN_FORMAT = 1
PUBLISHER, DERIVED = "publisher", "derived"


@dataclass(frozen=True, slots=True)
class SourceId:
    """Which checkpoint a plan was made for."""

    label: str
    kind: str
    revision: str | None
    fingerprint: str

    def to_json(self) -> dict[str, str | None]:
        return {
            "label": self.label, "kind": self.kind, "revision": self.revision, "fingerprint": self.fingerprint,
        }  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """See the module docstring.

    Attributes:
        recipe: what was asked.
        source: which checkpoint.
        family: name of the family table.
        fates: every source tensor exactly once, in source order.
        decode: files of the decode view; empty when ``decode_is_source``.
        prefill: files of a derived prefill view; empty when ``prefill_is_source``.
        folds: files with the scales that are moved from up to down; empty without a method that does.
        decode_config: config.json of the decode view, quantization_config included.
        prefill_config: config.json of the prefill view; None: the source's, byte for byte.
        prefill_origin, decode_origin: ``publisher`` (a view holds the source's files as they are) or ``derived``.
        source_storage: how the routed experts of the source are stored: ``fp8``, ``plain`` or ``int4``.
        sizes: exact bytes.
        warnings: what the user should know.
        limits: name of a routed expert's weight that is quantized -> its limit in the quality budget.
        kept_layers: decoder layers that amendments leave as the source has them; empty when planning.
        caught: for each override of the recipe, how many modules it decided.
    """

    recipe: Recipe
    source: SourceId
    family: str
    fates: Mapping[str, Fate]
    decode: tuple[Shard, ...]
    prefill: tuple[Shard, ...]
    decode_config: Mapping[str, Any]
    prefill_config: Mapping[str, Any] | None
    prefill_origin: str
    decode_origin: str
    source_storage: str
    sizes: Sizes
    warnings: tuple[str, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    kept_layers: frozenset[int] = frozenset()
    caught: tuple[int, ...] = ()
    folds: tuple[Shard, ...] = ()

    def __repr__(self) -> str:
        """Short: a plan of a large model holds some hundred thousand fates."""
        return f"<Plan of {self.source.label} by {self.recipe.name}: {len(self.fates):,} tensors>"

    @property
    def prefill_is_source(self) -> bool:
        """The publisher's files are the prefill view as they are."""
        return self.prefill_origin == PUBLISHER

    @property
    def decode_is_source(self) -> bool:
        """The publisher's files are the decode view as they are (native INT4 source)."""
        return self.decode_origin == PUBLISHER

    @property
    def shards(self) -> tuple[Shard, ...]:
        """All files with tensors to be written: both views and the folds."""
        return self.decode + self.prefill + self.folds

    def jobs(self, view: str) -> Iterator[Job]:
        """Jobs of ``decode`` or ``prefill`` in file order."""
        for shard in self.decode if view == "decode" else self.prefill:
            yield from shard.jobs

    @cached_property
    def quantized_layers(self) -> tuple[int, ...]:
        """Decoder layers with at least one quantized module."""
        found = {f.layer for f in self.fates.values() if f.decode is Action.QUANTIZE and f.layer is not None}
        return tuple(sorted(found))

    @cached_property
    def methods(self) -> dict[tuple[str, int], int]:
        """(method, group size) -> number of modules that are quantized so, the most common first."""
        found = Counter(
            (job.method or "", job.group_size or 0) for job in self.jobs("decode") if job.op is Op.TO_INT4
        )
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    @cached_property
    def disk(self) -> DiskNeed:
        """Free space needed."""
        num_outputs = sum(len(job.outputs) for shard in self.shards for job in shard.jobs)
        # Index, tensors.jsonl and journal hold about 400, 700 and 200 bytes a tensor; tokenizers take up to 30 MB.
        other = 32_000_000 + 700 * len(self.fates) + 600 * num_outputs
        other += sum(shard.file_nbytes for shard in self.folds)
        return DiskNeed(
            self.sizes.decode.file_bytes if self.decode else 0,
            self.sizes.prefill.file_bytes if self.prefill else 0,
            self.sizes.source.file_bytes if self.prefill_is_source or self.decode_is_source else 0,
            other,
        )

    @cached_property
    def plan_id(self) -> str:
        """sha256 of everything that this plan would do: fates, jobs, files and both configs."""
        digest = hashlib.sha256()
        head = {
            "format": PLAN_FORMAT, "recipe": self.recipe.content(), "fingerprint": self.source.fingerprint,
            "family": self.family, "decode_config": self.decode_config, "prefill_config": self.prefill_config,
            "prefill_origin": self.prefill_origin, "decode_origin": self.decode_origin,
            **({} if self.recipe.engine == "quantkit" else {"engine": self.recipe.engine}),
        }  # fmt: skip
        digest.update(_canonical(head))
        for fate in self.fates.values():
            digest.update(_canonical(fate_row(fate)))
        for shard in self.shards:
            digest.update(_canonical([shard.view, shard.file, shard.layer]))
            for job in shard.jobs:
                outputs = [[t.name, t.dtype, t.shape] for t in job.outputs]
                digest.update(_canonical([job.op, job.sources, outputs, job.method, job.group_size]))
        return digest.hexdigest()

    @classmethod
    def from_json(cls, text: str, *, where: str = "plan") -> Plan:
        """Open the source that a plan file names, build the plan again and compare; see ``plan_file``.

        Raises:
            RecipeError: not a plan file, edited, or the source has changed since.
        """
        from .plan_file import parse_plan, rebuild

        data = parse_plan(text, where=where)
        plan, checkpoint = rebuild(data, where=where)
        checkpoint.close()
        return plan

    def fate_counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """view -> role -> action -> number of source tensors; the summary of ``fates``."""
        counts: dict[str, dict[str, Counter[str]]] = {"decode": {}, "prefill": {}}
        for fate in self.fates.values():
            for view, action in (("decode", fate.decode), ("prefill", fate.prefill)):
                counts[view].setdefault(fate.role.value, Counter())[action.value] += 1
        return {view: {role: dict(c) for role, c in sorted(roles.items())} for view, roles in counts.items()}

    def summary(self) -> dict[str, Any]:
        """JSON-ready overview without the fates."""
        folds = {"folds": len(self.folds)} if self.folds else {}
        return {
            "plan_format": PLAN_FORMAT,
            "plan_id": self.plan_id,
            "source": self.source.to_json(),
            "source_storage": self.source_storage,
            "family": self.family,
            "recipe": self.recipe.model_dump(mode="json"),
            "prefill_origin": self.prefill_origin,
            "decode_origin": self.decode_origin,
            "tensors": len(self.fates),
            "fates": self.fate_counts(),
            "sizes": self.sizes.to_json(),
            "files": {"decode": len(self.decode), "prefill": len(self.prefill), **folds},
            "quantized_layers": list(self.quantized_layers),
            "methods": [
                {"method": method, "group_size": size, "modules": n} for (method, size), n in self.methods.items()
            ],
            "overrides_caught": list(self.caught),
            "quantization_config": self.decode_config.get("quantization_config"),
            "warnings": list(self.warnings),
        }

    def to_json(self) -> dict[str, Any]:
        """The plan file: the summary, and every fate as a row of ``FATE_COLUMNS``."""
        return {
            **self.summary(),
            "fate_columns": list(FATE_COLUMNS),
            "fate_rows": [fate_row(fate) for fate in self.fates.values()],
        }


FATE_COLUMNS = (
    "name", "role", "layer", "expert", "is_mtp", "decode", "prefill", "decode_names", "prefill_names", "reason",
)  # fmt: skip


def fate_row(fate: Fate) -> list[Any]:
    """A fate as a JSON-ready list in the order of ``FATE_COLUMNS``."""
    return [
        fate.name, fate.role.value, fate.layer, fate.expert, fate.is_mtp, fate.decode.value, fate.prefill.value,
        list(fate.decode_names), list(fate.prefill_names), fate.reason,
    ]  # fmt: skip


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
