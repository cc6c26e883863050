"""Plan files: written for people and machines to read, loaded by planning again and comparing.

Rebuilding instead of trusting the file means that an edited or outdated plan can't make a conversion do something
that planning would refuse; the comparison of ``plan_id`` means that what runs is exactly what was approved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EnvironmentProblem, RecipeError
from ..recipe.validate import validate
from .build import build_plan
from .plan import PLAN_FORMAT, Plan

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write ``plan.json``.

    Raises:
        EnvironmentProblem: the file can't be written.
    """
    try:
        Path(path).write_text(
            json.dumps(plan.to_json(), indent=None, ensure_ascii=False, separators=(",", ":")) + "\n",
            encoding="utf-8",
        )
    except OSError as error:
        raise EnvironmentProblem(f"cannot write the plan: {error.strerror}", where=str(path)) from None


def load_plan(
    path: str | Path, *, checkpoint: Checkpoint | None = None, cache_dir: str | Path | None = None,
    token: str | None = None,
) -> tuple[Plan, Checkpoint]:  # fmt: skip
    """Read ``plan.json``, open its source and build the plan again.

    Args:
        checkpoint: the source, if it is open already (or has moved); else it is opened from the plan's label and
            revision. The caller closes it.
        cache_dir, token: for hub sources.

    Raises:
        RecipeError: not a plan file; the source has changed since; or this version of quantkit plans it differently.
    """
    data = _read(Path(path))
    where = str(path)
    recipe = validate(data["recipe"], where=f"{where}: recipe")
    source = data["source"]
    opened = checkpoint
    if opened is None:
        from ..checkpoint import open_checkpoint

        revision = source.get("revision") if source.get("kind") == "hub" else None
        opened = open_checkpoint(source["label"], revision=revision, cache_dir=cache_dir, token=token)
    try:
        return _rebuild(data, opened, recipe, where), opened
    except BaseException:
        if checkpoint is None:
            opened.close()
        raise


def _rebuild(data: dict[str, Any], checkpoint: Checkpoint, recipe: Any, where: str) -> Plan:
    if checkpoint.fingerprint != data["source"].get("fingerprint"):
        raise RecipeError(
            f"the source {checkpoint.label} has changed since the plan was made", where=where,
            accepted=f"fingerprint {data['source'].get('fingerprint')}, seen {checkpoint.fingerprint}",
            hint="Make the plan again.",
        )  # fmt: skip
    plan = build_plan(checkpoint, recipe)
    if plan.plan_id != data["plan_id"]:
        raise RecipeError(
            f"planning again gives another plan ({plan.plan_id[:12]} instead of {str(data['plan_id'])[:12]})",
            where=where, hint="The file was edited or made by another version of quantkit; make the plan again.",
        )  # fmt: skip
    rows = data.get("fate_rows")
    if rows != plan.to_json()["fate_rows"]:
        raise RecipeError(
            "the fates in the file are not those of its plan_id", where=where, hint="Make the plan again."
        )
    return plan


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise RecipeError(
            f"is not a plan file: {error}", where=str(path), accepted="what `plan -o` wrote"
        ) from None
    needed = {"plan_format": int, "plan_id": str, "recipe": dict, "source": dict}
    bad = [k for k, kind in needed.items() if not isinstance(data, dict) or not isinstance(data.get(k), kind)]
    if bad or not isinstance(data["source"].get("label"), str):
        raise RecipeError(
            f"is not a plan file: {', '.join(bad) or 'source.label'} is missing or of the wrong kind",
            where=str(path), accepted="what `plan -o` wrote",
        )  # fmt: skip
    if data["plan_format"] != PLAN_FORMAT:
        raise RecipeError(
            f"plan format {data['plan_format']} is not supported", where=str(path), accepted=str(PLAN_FORMAT)
        )
    return data
