"""From SOURCE and options to a plan: what ``plan`` and ``convert`` have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quantkit import api

from ..errors import UsageError
from .console import Console
from .options import Choice

if TYPE_CHECKING:
    from quantkit.checkpoint import Checkpoint
    from quantkit.plan import Plan


@contextmanager
def planned(
    source: str | None, choice: Choice, revision: str | None, out: Console, plan_file: str | None = None
) -> Iterator[tuple[Checkpoint, Plan]]:
    """The opened source and its plan, made from the options or read from a file.

    Raises:
        UsageError: neither a source nor a plan, or options beside a plan that has decided them.
    """
    if plan_file is None:
        if source is None:
            hint = (
                f"To convert what {choice.recipe} names, give it as SOURCE." if choice.recipe is not None else None
            )
            raise UsageError("there is no SOURCE", accepted="a source, a recipe, or --plan FILE", hint=hint)
        found = api.resolve(source, revision=revision)
        if found.is_hub:
            out.say(f"reading the headers of {found.source} on the Hub")
        with api.open(found.source, revision=found.revision) as checkpoint:
            recipe = choice.recipe if choice.recipe is not None else found.recipe
            made = api.plan(checkpoint, recipe=recipe, **choice.fields)
            out.detail(f"recipe {made.recipe.name}, family {made.family}, plan {made.plan_id}")
            yield checkpoint, made
        return
    if choice.given or revision is not None:
        options = ", ".join([*choice.given, *(["--revision"] if revision is not None else [])])
        raise UsageError(
            f"{options} cannot change a finished plan", where="--plan", hint="Make a new plan with these options."
        )
    given = api.open(source) if source is not None else None
    made, checkpoint = api.load_plan(plan_file, checkpoint=given)
    with checkpoint:
        yield checkpoint, made
