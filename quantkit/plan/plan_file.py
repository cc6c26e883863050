"""Plan files: written for people and machines to read, loaded by planning again and comparing.

Rebuilding instead of trusting the file means that an edited or outdated plan can't make a conversion do something
that planning would refuse; the comparison of ``plan_id`` means that what runs is exactly what was approved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EnvironmentProblem, RecipeError, UsageError
from ..recipe.validate import validate
from .build import build_plan
from .plan import PLAN_FORMAT, Plan, fate_row

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..recipe import Recipe

_BEGINS = b'{"plan_format":'
_ACCEPTED = "what `quantkit plan -o` wrote"


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write ``plan.json``.

    Raises:
        EnvironmentProblem: the file can't be written.
        UsageError: a file that is no plan is there.
    """
    # ASCII: a path in it may hold bytes that are no text.
    data = json.dumps(plan.to_json(), indent=None, separators=(",", ":")).encode() + b"\n"
    try:
        _refuse_other_file(Path(path))
        Path(path).write_bytes(data)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write the plan: {error.strerror}", where=str(path)) from None


def _refuse_other_file(path: Path) -> None:
    if path.is_file() and path.stat().st_size:
        with open(path, "rb") as handle:
            if not handle.read(len(_BEGINS)) == _BEGINS:
                raise UsageError(
                    "is there already and is no plan", where=str(path), accepted="a new file, or an older plan",
                    hint="Choose another file, or delete this one.",
                )  # fmt: skip


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
        RecipeError: not a plan file; the source has changed since; or this quantkit plans it differently.
    """
    try:
        if Path(path).is_char_device():
            raise RecipeError("is a device, not a plan file", where=str(path), accepted=_ACCEPTED)
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"is not a plan file: {error}", where=str(path), accepted=_ACCEPTED) from None
    data = parse_plan(text, where=str(path))
    return rebuild(data, where=str(path), checkpoint=checkpoint, cache_dir=cache_dir, token=token)


def parse_plan(text: str, *, where: str) -> dict[str, Any]:
    """The content of a plan file, checked for form only.

    Raises:
        RecipeError: not a plan file, or of another format.
    """
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"is not a plan file: {error}", where=where, accepted=_ACCEPTED) from None
    needed = {"plan_format": int, "plan_id": str, "recipe": dict, "source": dict, "fate_rows": list}
    bad = [k for k, kind in needed.items() if not isinstance(data, dict) or not isinstance(data.get(k), kind)]
    if bad or not isinstance(data["source"].get("label"), str):
        what = ", ".join(bad) or "source.label"
        raise RecipeError(
            f"is not a plan file: {what} is missing or of the wrong kind", where=where, accepted=_ACCEPTED
        )
    if data["plan_format"] != PLAN_FORMAT:
        raise RecipeError(
            f"plan format {data['plan_format']} is not supported", where=where, accepted=str(PLAN_FORMAT)
        )
    return dict(data)


def rebuild(
    data: dict[str, Any], *, where: str, checkpoint: Checkpoint | None = None,
    cache_dir: str | Path | None = None, token: str | None = None,
) -> tuple[Plan, Checkpoint]:  # fmt: skip
    """Plan again what ``parse_plan`` returned; see ``load_plan``."""
    recipe = validate(data["recipe"], where=f"{where}: recipe")
    source = data["source"]
    if checkpoint is not None:
        return _compare(data, _build(data, checkpoint, recipe, where), where), checkpoint
    from ..checkpoint import open_checkpoint

    revision = source.get("revision") if source.get("kind") == "hub" else None
    opened = open_checkpoint(source["label"], revision=revision, cache_dir=cache_dir, token=token)
    try:
        return _compare(data, _build(data, opened, recipe, where), where), opened
    except BaseException:
        opened.close()
        raise


def _build(data: dict[str, Any], checkpoint: Checkpoint, recipe: Recipe, where: str) -> Plan:
    """Build the plan, if the checkpoint is still the one that was planned for."""
    if checkpoint.fingerprint != data["source"].get("fingerprint"):
        raise RecipeError(
            f"the source {checkpoint.label} has changed since the plan was made", where=where,
            accepted=f"fingerprint {data['source'].get('fingerprint')}, seen {checkpoint.fingerprint}",
            hint="Make the plan again.",
        )  # fmt: skip
    return build_plan(checkpoint, recipe)


def _compare(data: dict[str, Any], plan: Plan, where: str) -> Plan:
    if plan.plan_id != data["plan_id"]:
        raise RecipeError(
            f"planning again gives another plan ({plan.plan_id[:12]} instead of {data['plan_id'][:12]})",
            where=where, hint="The file was edited or made by another version of quantkit; make the plan again.",
        )  # fmt: skip
    if data["fate_rows"] != [fate_row(fate) for fate in plan.fates.values()]:
        raise RecipeError(
            "the fates in the file are not those of its plan_id", where=where, hint="Make the plan again."
        )
    return plan
