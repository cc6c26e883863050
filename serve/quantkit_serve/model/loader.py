"""From an artifact or a checkpoint to the weights of both phases, what both share loaded once.

``dual`` takes the prefill view for one phase and the decode view for the other. A tensor with the same digest in
both (tensors.jsonl) is one object in memory, whichever file it is mapped from. ``fp8`` and ``int4`` take one view
for both phases; a plain checkpoint has just one. Scales that AWQ folded (``folds/``) are not needed to run.

Every tensor of a loaded view is used, or left out for a reason that is known by its name; anything else is an
error, since a model with a tensor too many or too few is another model. Multi-token-prediction layers are left out
unless one is asked for, which then comes from the decode view alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quantkit.artifact import Artifact
from quantkit.artifact.layout import MANIFEST
from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.checkpoint.tensor import Storage
from quantkit.errors import ArtifactError, SourceError, UsageError
from quantkit.models.classify import Classifier, find_family
from quantkit.models.role import Role
from quantkit_kernels.forward.weights import Fp8Weight, Int4Weight

from ..config import WeightSet
from .mapped import MappedTensors
from .weights import Dual, Linear, PlainWeight, Stored

if TYPE_CHECKING:
    from quantkit.artifact.records import TensorRecord

_LEFT_OUT = (Role.MTP, Role.VISION)


@dataclass(frozen=True)
class Opened:
    """Weight sets of a model.

    Attributes:
        weights: root of the names, ``Weights``.
        classifier: names of the checkpoint by its family.
        config: config.json.
        eos_token_ids: tokens that end an answer.
    """

    weights: LoadedWeights
    classifier: Classifier
    config: Mapping[str, Any]
    eos_token_ids: frozenset[int]


def open_weights(source: str | PathLike[str], weight_set: WeightSet) -> Opened:
    """Open an artifact's directory, or what ``open_checkpoint`` takes.

    Raises:
        ArtifactError: views that don't belong together, or without bytes.
        SourceError, UnsupportedError: the checkpoint.
        UsageError: a plain checkpoint has no such weight set.
    """
    prefill, decode = _views(source, weight_set)
    checkpoint = decode.checkpoint
    classifier = find_family(checkpoint.config, checkpoint.tensors)
    weights = LoadedWeights(prefill, decode, classifier)
    return Opened(weights, classifier, checkpoint.config, _eos(checkpoint))


def _views(source: str | PathLike[str], weight_set: WeightSet) -> tuple[MappedTensors, MappedTensors]:
    if (Path(source) / MANIFEST).is_file():
        return _artifact_views(Artifact.open(source), weight_set)
    checkpoint = open_checkpoint(source)
    has_int4 = any(weight.storage is Storage.INT4_GROUP for weight in checkpoint.weights().values())
    if weight_set == "dual" or has_int4 != (weight_set == "int4"):
        raise UsageError(
            f"a plain checkpoint has no weight set {weight_set!r}", where=checkpoint.label,
            accepted="int4" if has_int4 else "fp8", hint="`quantkit convert` makes an artifact with both.",
        )  # fmt: skip
    only = MappedTensors(checkpoint)
    return only, only


def _artifact_views(artifact: Artifact, weight_set: WeightSet) -> tuple[MappedTensors, MappedTensors]:
    wanted = {"dual": (artifact.prefill, artifact.decode), "fp8": (artifact.prefill,), "int4": (artifact.decode,)}
    for view in wanted[weight_set]:
        if not view.is_reference and view.mark.pair_id != artifact.manifest.pair_id:
            raise ArtifactError(
                f"belongs to the pair {view.mark.pair_id[:16]}", where=str(view.path),
                accepted=artifact.manifest.pair_id[:16], hint="Views of different artifacts were put together.",
            )  # fmt: skip
    if weight_set != "dual":
        only = MappedTensors(wanted[weight_set][0].tensors)
        return only, only
    prefill, decode = _digests(artifact.records())
    return MappedTensors(artifact.prefill.tensors, prefill), MappedTensors(artifact.decode.tensors, decode)


def _digests(records: Iterable[TensorRecord]) -> tuple[dict[str, str], dict[str, str]]:
    prefill: dict[str, str] = {}
    decode: dict[str, str] = {}
    for record in records:
        prefill |= record.prefill.tensors(record.name, record.sha256)
        decode |= record.decode.tensors(record.name, record.sha256)
    return prefill, decode


class LoadedWeights:
    """See ``Weights``; the root of all names."""

    def __init__(self, prefill: MappedTensors, decode: MappedTensors, classifier: Classifier) -> None:
        self._prefill, self._decode, self._classifier = prefill, decode, classifier
        self._linears: dict[tuple[object, ...], Stored] = {}
        self._biases: dict[str, Tensor | None] = {}
        self._in_phase: tuple[dict[int, int], dict[int, int]] = ({}, {})  # address -> bytes, of prefill and decode
        self._predictions: set[int | None] = set()  # layers whose tensors must all have a place

    def below(self, name: str) -> Scope:
        return Scope(self, f"{name}.")

    def of_prediction(self, name: str, layer: int) -> Scope:
        """A multi-token-prediction layer as the decode view has it; both versions of its linears are that one."""
        self._predictions.add(layer)
        return Scope(self, f"{name}.", is_decode_only=True)

    def has(self, name: str) -> bool:
        return self._decode.has(name)

    def linear(self, name: str, *, is_decode_only: bool = False) -> Dual[Linear]:
        if is_decode_only:
            only = self._linear(self._decode, 1, name)
            return Dual(only, only)
        prefill, decode = self._linear(self._prefill, 0, name), self._linear(self._decode, 1, name)
        return Dual(prefill, prefill if decode.weight is prefill.weight else decode)

    def tensor(self, name: str, *, is_decode_only: bool = False) -> Tensor:
        if self._prefill is not self._decode and not is_decode_only:
            if self._prefill.identity((name,)) != self._decode.identity((name,)):
                self._prefill.info(name), self._decode.info(name)  # missing in one: its own error
                raise SourceError("differs between the views; only linears may", where=name)
            self._prefill.used.add(name)
        found = self._decode.tensor(name)
        for phase in (1,) if is_decode_only else (0, 1):
            self._in_phase[phase][found.data_ptr()] = found.nbytes
        return found

    def memory(self) -> dict[str, int]:
        """Bytes of the loaded tensors that both phases use, and that one of them uses."""
        prefill, decode = self._in_phase
        return {
            "shared": sum(nbytes for address, nbytes in prefill.items() if address in decode),
            "prefill": sum(nbytes for address, nbytes in prefill.items() if address not in decode),
            "decode": sum(nbytes for address, nbytes in decode.items() if address not in prefill),
        }

    def refuse_strangers(self) -> None:
        """Once the model is built: every tensor was used or is left out on purpose.

        Raises:
            SourceError: names the first tensor that has no place.
        """
        for source in {id(s): s for s in (self._prefill, self._decode)}.values():
            loaded = self._predictions if source is self._decode else set[int | None]()
            unused = [name for name in source.checkpoint.tensors if name not in source.used]
            strangers = [name for name in unused if not self._is_left_out(name, loaded)]
            if strangers:
                raise SourceError(
                    f"tensors without a place in the model: {len(strangers)}, the first is {strangers[0]!r}",
                    where=source.checkpoint.label, accepted=f"the tensors of {self._classifier.family.name}",
                )  # fmt: skip

    def _is_left_out(self, name: str, loaded: set[int | None]) -> bool:
        role = self._classifier.role_of(name)
        if role.is_mtp and role.layer in loaded:
            return role.part == "inv_freq"
        return role.is_mtp or role.role in _LEFT_OUT or role.part == "inv_freq"

    def _linear(self, source: MappedTensors, phase: int, name: str) -> Linear:
        weight = source.weight(name)
        key = (weight.storage, weight.block, source.identity(tuple(part.name for part in weight.parts)))
        if key not in self._linears:
            self._linears[key] = source.load(weight)
        found = self._linears[key]
        for part in parts(found):
            self._in_phase[phase][part.data_ptr()] = part.nbytes
        if name not in self._biases:
            bias = f"{name}.bias"
            is_decode_only = phase == 1 and self._classifier.role_of(bias).is_mtp
            self._biases[name] = self.tensor(bias, is_decode_only=is_decode_only) if source.has(bias) else None
        return Linear(found, self._biases[name])


@dataclass(frozen=True)
class Scope:
    """The weights below a module."""

    root: LoadedWeights
    prefix: str
    is_decode_only: bool = False

    def below(self, name: str) -> Scope:
        return Scope(self.root, f"{self.prefix}{name}.", self.is_decode_only)

    def has(self, name: str) -> bool:
        return self.root.has(self.prefix + name)

    def linear(self, name: str) -> Dual[Linear]:
        return self.root.linear(self.prefix + name, is_decode_only=self.is_decode_only)

    def tensor(self, name: str) -> Tensor:
        return self.root.tensor(self.prefix + name, is_decode_only=self.is_decode_only)


def parts(weight: Stored) -> Iterator[Tensor]:
    """The tensors of a weight."""
    if isinstance(weight, PlainWeight):
        yield weight.values
    elif isinstance(weight, Int4Weight):
        yield from (weight.packed, weight.scale)
    elif isinstance(weight, Fp8Weight):
        yield from (weight.codes, weight.scale)


def _eos(checkpoint: Checkpoint) -> frozenset[int]:
    """From generation_config.json, else config.json; either may hold one id or a list."""
    found: object = None
    if any(side.name == "generation_config.json" for side in checkpoint.side_files):
        with suppress(ValueError):
            content = json.loads(checkpoint.side_bytes("generation_config.json"))
            found = content.get("eos_token_id") if isinstance(content, dict) else None
    if found is None:
        text = checkpoint.config.get("text_config", checkpoint.config)
        found = text.get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    return frozenset(i for i in ids if isinstance(i, int) and not isinstance(i, bool))
