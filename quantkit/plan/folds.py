"""Which experts have a scale moved from up to down, and the jobs that write it.

A fold is for both projections of an expert or for neither (``treatments``), or the expert would compute something
else. The scales go to files of their own, by layer like those of a view, so that no view holds a tensor that
engines don't know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..models.role import Role
from ..recipe.sections import FOLDING_METHODS
from ..scheme import fold_tensor
from .fate import Job, Op
from .selection import Modules
from .views import Outcome


def fold_jobs(modules: Modules, outcomes: Mapping[str, Outcome]) -> Iterator[tuple[int | None, Job]]:
    """(layer, job) for every routed expert that is folded.

    Args:
        outcomes: of the decode view, by module.
    """
    experts: dict[str, dict[str, str]] = {}
    for module, role in modules.roles.items():
        if role.role is Role.ROUTED_EXPERT and role.projection in ("up", "down"):
            experts.setdefault(module.rpartition(".")[0], {})[role.projection] = module
    for expert in experts.values():
        method = _method(outcomes[expert["up"]])
        if method in FOLDING_METHODS:  # and down's method is the same: ``treatments`` has seen to it
            up, down = (modules.weights[expert[projection]] for projection in ("up", "down"))
            sources, scale = (up.weight.name, down.weight.name), fold_tensor(up.module, up.shape[0])
            yield modules.roles[up.module].layer, Job(Op.FOLD, sources, (scale,), method)


def _method(outcome: Outcome) -> str | None:
    return next((job.method for job in outcome.jobs if job.op is Op.TO_INT4), None)
