"""Linears outside the routed experts, calibrated stage by stage from all tokens of the calibration set.

Linears with the same input share one Hessian and one factorisation; a later stage learns behind the quantized
weights of the earlier ones, because that is what it will see. Every token counts 1: there is no routing weight
here, and no starvation. Only one stage's Hessian is in memory.

AWQ's fold moves scales inside an expert, so outside of them ``awq`` means scales and clips searched by the
inputs' energy (``awq.round_by_importance``), and ``gptq+awq`` means ``gptq``.

``propagate`` and ``down_inputs`` mean the same as for experts. With ``propagate: original`` the layer gets its
original weights back when all its linears are done, so that its routed experts too see what the original makes of
the samples. With ``down_inputs: original`` no linear learns behind a quantized one of its own layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from quantkit.recipe.treatment import Treatment

from .awq import round_by_importance
from .expert import ExpertSettings
from .gptq import Calibrated, gptq
from .hessian import Hessian
from .linears import Linears
from .memory import give_back_freed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Wanted:
    """A linear to be calibrated.

    Attributes:
        path: in the layer.
        name: in the checkpoint, for errors.
        treatment: how it is quantized.
        finished: gives the numbers ``[O, I]`` of its INT4 weight if an earlier run made it, else None.
    """

    path: str
    name: str
    treatment: Treatment
    finished: Callable[[], NDArray[np.float32]] | None = None


def calibrate_linears(
    linears: Linears, wanted: Sequence[Wanted], settings: ExpertSettings
) -> Iterator[tuple[Wanted, Calibrated]]:
    """Quantize linears of a loaded layer, and leave in it the weights that go on.

    Args:
        settings: ``gptq`` (but the group size), ``propagate`` and ``down_inputs``.

    Yields:
        Each with its result, in the order of the stages; nothing of a stage that is finished. At process 0 only,
        the others get the weights from it.

    Raises:
        SourceError: an activation that is not finite, a Hessian that stays singular; the linear is named.
        UnsupportedError: as ``Linears.stages``.
    """
    by_path = {one.path: one for one in wanted}
    originals = {path: linears.weight(path) for path in by_path} if settings.propagate == "original" else {}
    later: dict[str, NDArray[np.float32]] = {}
    stages = linears.tell(linears.stages(by_path) if wanted and linears.is_first else [])
    for stage in stages:
        members = [by_path[path] for path in stage]
        found: dict[str, NDArray[np.float32]] = {}
        if linears.tell(all(one.finished for one in members)):
            found = {one.path: one.finished() for one in members if one.finished}
        else:
            hessian = _hessian(linears, members)
            for alike in _alike(members) if linears.is_first else ():
                for one, result in zip(alike, _quantize(linears, alike, hessian, settings), strict=True):
                    found[one.path] = result.float32()
                    yield one, result
            del hessian
            give_back_freed()
        later |= linears.tell(found)
        if settings.down_inputs == "quantized":
            _put(linears, later)
    _put(linears, originals or later)


def _hessian(linears: Linears, members: Sequence[Wanted]) -> Hessian:
    """Of the input that the members share."""
    path, where = members[0].path, ", ".join(one.name for one in members)
    hessian = Hessian(linears.weight(path).shape[1], where=where, device=linears.device)
    for inputs in linears.inputs(path):
        linears.compute(partial(hessian.add, inputs))
    return hessian


def _alike(members: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Members that are quantized in the same way."""
    groups: dict[Treatment, list[Wanted]] = {}
    for one in members:
        groups.setdefault(one.treatment, []).append(one)
    yield from groups.values()


def _quantize(
    linears: Linears, alike: Sequence[Wanted], hessian: Hessian, settings: ExpertSettings
) -> list[Calibrated]:
    treatment = alike[0].treatment
    quantize = round_by_importance if treatment.method == "awq" else gptq
    knobs = replace(settings.gptq, group_size=treatment.group_size)
    weights = [linears.weight(one.path) for one in alike]
    return linears.compute(lambda: quantize(weights, hessian, knobs))


def _put(linears: Linears, weights: dict[str, NDArray[np.float32]]) -> None:
    for path, weight in weights.items():
        linears.replace(path, weight)
