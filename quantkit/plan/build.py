"""From a checkpoint's headers and a recipe to a plan. No tensor data is read.

The kind of source decides the views:

- FP8 experts: the publisher's files are the prefill view, the decode view is written.
- plain (BF16) experts, with ``make_fp8``: both views are written, both from the plain weights.
- INT4 experts, with ``make_fp8``: the publisher's files are the decode view, the prefill view is expanded.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..checkpoint.tensor import Storage, StoredWeight, TensorInfo
from ..errors import GateFailed, RecipeError, UnsupportedError
from ..models.classify import Classifier, find_family
from ..models.config import quantization_of
from ..models.quantization import read_quantization
from ..models.role import Role, TensorRole
from ..recipe.recipe import Recipe
from ..recipe.sections import CalibrationSection
from ..scheme import Scheme, decode_scheme
from .engine import check_engine, check_engine_modules, engine_warnings
from .experts import check_experts, check_layers
from .fate import KEPT_BY_BUDGET, Action, Fate, Job, Shard
from .folds import fold_jobs
from .notices import notices
from .plan import DERIVED, PUBLISHER, Plan, SourceId
from .quantization_config import decode_config, prefill_config
from .selection import Modules, ranges
from .shards import pack
from .sizes import Sizes, ViewSize, measure_shards, measure_source
from .source import check_family, no_fp8_side, resolved_recipe, source_storage
from .targets import Universe
from .treatments import Treatments, treatments
from .views import Outcome, copied, copy, decode_rest, is_fp8_selected, quantized, to_fp8, untouched

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

# Tensors that change what a quantized weight means; to drop or keep them would both be wrong.
_CALIBRATED_PARTS = ("input_scale", "weight_zero_point", "weight_g_idx")


def build_plan(checkpoint: Checkpoint, recipe: Recipe, *, kept_layers: frozenset[int] = frozenset()) -> Plan:
    """Decide the fate of every tensor.

    Args:
        kept_layers: decoder layers of which nothing is quantized, although the recipe asks for it: the plan as
            amended by a quality budget. Other layers' files are those of the plan without amendments.

    Raises:
        UnsupportedError: no routed experts; a source without an FP8 side and no ``make_fp8``; a format that is not
            converted.
        SourceError: experts missing, incomplete or of different shapes; a scale missing or of the wrong shape.
        RecipeError: the recipe does not fit the source (layers, patterns, group size, family).
        GateFailed: with ``kept_layers`` nothing is left to quantize.
    """
    with _collector_paused():
        return _Builder.prepare(checkpoint, recipe, kept_layers).build()


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No cyclic garbage collection meanwhile.

    A plan is half a million small objects without cycles that all live on; the collector would walk them again and
    again (a third of the time for 118,000 tensors).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass
class _Builder:
    """The state of one ``build_plan`` call."""

    checkpoint: Checkpoint
    recipe: Recipe
    classifier: Classifier
    modules: Modules
    storage: str
    warnings: list[str]
    kept_layers: frozenset[int]
    kept: frozenset[str] = frozenset()  # modules that would be quantized without kept_layers

    @classmethod
    def prepare(cls, checkpoint: Checkpoint, recipe: Recipe, kept_layers: frozenset[int]) -> _Builder:
        check_family(recipe, checkpoint.config)
        check_engine(recipe)
        read_quantization(quantization_of(checkpoint.config))  # raises for one that no engine could read
        classifier = find_family(checkpoint.config, checkpoint.tensors, override=recipe.family)
        weights = checkpoint.weights()
        modules = _modules(checkpoint.tensors, weights, classifier)
        check_experts(weights, modules.roles, classifier.num_experts)
        odd_layers = check_layers(modules.all_roles(), classifier.num_layers)
        storage = source_storage(modules)
        if storage != "fp8" and not recipe.prefill.make_fp8:
            raise no_fp8_side(storage, modules)
        if storage == "fp8" and recipe.prefill.make_fp8:
            raise RecipeError(
                "make_fp8 (--make-fp8) derives FP8 from BF16 or INT4, but this source is FP8 already",
                where="prefill.make_fp8", hint="Leave it out: the published files are the prefill view.",
            )  # fmt: skip
        warnings = [*checkpoint.warnings, *classifier.warnings, *notices(checkpoint)]
        warnings += [odd_layers] if odd_layers else []
        return cls(checkpoint, recipe, classifier, modules, storage, warnings, kept_layers)

    def build(self) -> Plan:
        ways = Treatments({}, ())
        if self.storage == "int4":
            decode = {m: untouched(w) for m, w in self.modules.weights.items()}
            self._check_native_int4()
        else:
            ways = treatments(self.modules, self.recipe)
            decode = self._decode_outcomes(ways)
        prefill = self._prefill_outcomes()
        max_bytes = self.recipe.output.max_shard_bytes
        writes_decode, writes_prefill = self.storage != "int4", self.storage != "fp8"
        decode_shards = pack("decode", self._jobs(decode), max_bytes) if writes_decode else ()
        folds = pack("folds", fold_jobs(self.modules, decode), max_bytes) if writes_decode else ()
        prefill_shards = pack("prefill", self._jobs(prefill), max_bytes) if writes_prefill else ()
        fates = self._fates(decode, prefill)
        return Plan(
            recipe=resolved_recipe(self.recipe, self.classifier, self.storage),
            source=_source_id(self.checkpoint),
            family=self.classifier.family.name,
            fates=fates,
            decode=decode_shards,
            prefill=prefill_shards,
            decode_config=self._decode_config(decode) if writes_decode else self.checkpoint.config,
            prefill_config=prefill_config(self.checkpoint.config, prefill) if writes_prefill else None,
            prefill_origin=DERIVED if writes_prefill else PUBLISHER,
            decode_origin=DERIVED if writes_decode else PUBLISHER,
            source_storage=self.storage,
            sizes=self._sizes(fates, decode_shards, prefill_shards),
            warnings=tuple(self.warnings),
            limits=self._limits(decode),
            kept_layers=self.kept_layers,
            caught=ways.caught,
            folds=folds,
        )

    def _decode_outcomes(self, ways: Treatments) -> dict[str, Outcome]:
        chosen = frozenset(ways.by_module)
        self._check_quantizable(ways)
        if self.recipe.decode.mtp == "quantize":
            mtp = {m for m, r in self.modules.roles.items() if r.is_mtp}
            if not mtp:
                self.warnings.append("decode.mtp is quantize, but the source has no multi-token-prediction layers")
            elif not mtp & chosen:
                self.warnings.append(
                    "decode.mtp is quantize, but decode.layers, decode.keep or an override leaves those layers out"
                )
        chosen = self._amended(chosen)
        self._warn_of_exponent_scales(chosen)
        self.warnings += engine_warnings(self.recipe, self.modules)
        return {
            module: quantized(weight, self._scheme((way := ways.by_module[module]).group_size), way)
            if module in chosen
            else decode_rest(weight, self.recipe.decode, self._derives_fp8(module))
            for module, weight in self.modules.weights.items()
        }

    def _scheme(self, group_size: int) -> Scheme:
        return decode_scheme(self.recipe.decode.scheme, group_size)

    def _amended(self, chosen: frozenset[str]) -> frozenset[str]:
        """``chosen`` without what amendments keep."""
        self.kept = frozenset(m for m in chosen if self.modules.roles[m].layer in self.kept_layers)
        if self.kept and self.kept == chosen:
            raise GateFailed(
                f"every layer with something to quantize has a weight over its limit (layers "
                f"{ranges(self.kept_layers)}): nothing would be INT4", where="budget.max_relative_error",
                hint="Raise the limit, or choose a smaller group size or a better method.",
            )  # fmt: skip
        return chosen - self.kept

    def _limits(self, outcomes: Mapping[str, Outcome]) -> dict[str, float]:
        """What the quality budget allows each weight of a routed expert that is quantized."""
        budget = self.recipe.budget
        if budget is None:
            return {}
        limits = {
            self.modules.weights[module].weight.name: budget.limit(role.projection)
            for module, role in self.modules.roles.items()
            if role.role is Role.ROUTED_EXPERT and outcomes[module].stored is Storage.INT4_GROUP
        }
        found = {name: limit for name, limit in limits.items() if limit is not None}
        if not found and not self.kept_layers:
            raise RecipeError(
                "applies to no weight: no routed expert that it limits is quantized", where="budget",
                hint="Leave it out.",
            )  # fmt: skip
        return found

    def _warn_of_exponent_scales(self, chosen: frozenset[str]) -> None:
        """Scales stored as bare exponents pass through; the compressed-tensors layout knows float scales only."""
        kept = (w for m, w in self.modules.weights.items() if m not in chosen and w.scale is not None)
        odd = next((w.scale for w in kept if w.scale and w.scale.dtype == "F8_E8M0"), None)
        if odd is not None and self.recipe.decode.rest == "fp8":
            self.warnings.append(
                f"{odd.name} and others are stored as F8_E8M0 exponents and kept so in the decode view; "
                "engines that read float scales only need decode.rest: bf16"
            )

    def _prefill_outcomes(self) -> dict[str, Outcome]:
        weights = self.modules.weights
        if self.storage == "fp8":
            return {module: untouched(weight) for module, weight in weights.items()}
        return {m: to_fp8(w) if self._derives_fp8(m) else copied(w) for m, w in weights.items()}

    def _derives_fp8(self, module: str) -> bool:
        if self.storage == "fp8":
            return False
        return is_fp8_selected(self.modules.roles[module], self.classifier.family.keep_plain)

    def _check_quantizable(self, ways: Treatments) -> None:
        check_engine_modules(self.recipe, self.modules, frozenset(ways.by_module))
        for module, way in sorted(ways.by_module.items()):
            weight = self.modules.weights[module]
            if problem := self._scheme(way.group_size).problem(weight.shape):
                # With no group size that fits it is the source's fault, else the recipe's.
                error = UnsupportedError if "no supported" in problem else RecipeError
                raise error(
                    problem, where=weight.weight.place,
                    hint="Choose a group size that fits, or keep the module (decode.keep).",
                )  # fmt: skip
        for info, role in self.modules.others.values():
            if role.part in _CALIBRATED_PARTS and role.module in ways.by_module:
                raise UnsupportedError(
                    f"{role.part} of a module to be quantized is not supported", where=info.place,
                    accepted="FP8 weights with dynamic activation scales", hint="Keep the module (decode.keep).",
                )  # fmt: skip

    def _check_native_int4(self) -> None:
        """The decode view is the source as it is, so options that would change it can't be honoured."""
        decode, default = self.recipe.decode, type(self.recipe.decode)()
        group = next(w.block[1] for w in self.modules.weights.values() if w.storage is Storage.INT4_GROUP)
        asked = [
            k
            for k in ("linears", "mtp", "layers", "quantize", "keep")
            if getattr(decode, k) != getattr(default, k)
        ]
        if decode.group_size != group:
            asked.append("group_size")
        asked = ["overrides"] * bool(self.recipe.overrides) + [f"decode.{option}" for option in asked]
        if self.recipe.calibration not in (None, CalibrationSection()):
            asked.append("calibration")
        if self.recipe.budget is not None:
            asked.append("budget")
        if self.recipe.engine != "quantkit":
            asked.append("engine")
        if asked:
            raise RecipeError(
                f"{asked[0]} does not apply: the source is INT4 already (group size {group}) and its files are "
                "the decode view as they are", where=asked[0].partition(".")[0], hint="Leave the option out.",
            )  # fmt: skip

    def _decode_config(self, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
        universe = Universe(self.modules.roles, self.classifier.family)
        return decode_config(self.checkpoint.config, outcomes, universe, self._scheme)

    def _jobs(self, outcomes: Mapping[str, Outcome]) -> Iterator[tuple[int | None, Job]]:
        for module, outcome in outcomes.items():
            layer = self.modules.roles[module].layer
            for job in outcome.jobs:
                yield layer, job
        for name, (info, role) in self.modules.others.items():
            yield role.layer, copy(name, name, info.dtype, info.shape)

    def _fates(self, decode: Mapping[str, Outcome], prefill: Mapping[str, Outcome]) -> dict[str, Fate]:
        found: dict[str, Fate] = {}
        for module, weight in self.modules.weights.items():
            role = self.modules.roles[module]
            for part, (d, d_names), (p, p_names) in zip(
                weight.parts, decode[module].parts, prefill[module].parts, strict=True
            ):
                reason = KEPT_BY_BUDGET if module in self.kept else None
                found[part.name] = _fate(part.name, role, d, p, d_names, p_names, reason)
        for name, (_, role) in self.modules.others.items():
            found[name] = _fate(name, role, Action.KEEP, Action.KEEP, (name,), (name,))
        return {name: found[name] for name in self.checkpoint.tensors}

    def _sizes(self, fates: Mapping[str, Fate], decode: tuple[Shard, ...], prefill: tuple[Shard, ...]) -> Sizes:
        tensors = self.checkpoint.tensors
        source = measure_source(
            ((fates[n].role, t.dtype, t.nbytes) for n, t in tensors.items()),
            sum(f.nbytes for f in self.checkpoint.files.values()), len(self.checkpoint.files),
        )  # fmt: skip

        def view(shards: tuple[Shard, ...]) -> ViewSize:
            return measure_shards(shards, fates) if shards else source

        return Sizes(source, view(decode), view(prefill))


def _fate(
    name: str,
    role: TensorRole,
    decode: Action,
    prefill: Action,
    d_names: tuple[str, ...],
    p_names: tuple[str, ...],
    reason: str | None = None,
) -> Fate:
    return Fate(name, role.role, role.layer, role.expert, role.is_mtp, decode, prefill, d_names, p_names, reason)


def _source_id(checkpoint: Checkpoint) -> SourceId:
    return SourceId(checkpoint.label, checkpoint.kind, checkpoint.revision, checkpoint.fingerprint)


def _modules(
    tensors: Mapping[str, TensorInfo], weights: Mapping[str, StoredWeight], classifier: Classifier
) -> Modules:
    owned = {part.name for weight in weights.values() for part in weight.parts}
    roles = {module: classifier.role_of(weight.weight.name) for module, weight in weights.items()}
    others = {n: (info, classifier.role_of(n)) for n, info in tensors.items() if n not in owned}
    return Modules(weights, roles, others)
