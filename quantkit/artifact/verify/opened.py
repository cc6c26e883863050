"""Parts of an artifact that cannot be opened: said once, by the check of their headers.

One damaged shard, stray file or broken config.json closes a whole view. Every check that reads weights of it would
repeat the same cause for every weight; instead it fails with one line that says where the cause stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ...errors import QuantkitError
from ..folds import Folds
from ..records import TensorRecord
from ..view import View
from .findings import Findings, Section


def is_closed(name: str, findings: Findings, *parts: View | Folds) -> bool:
    """Whether a check cannot be made because one of these does not open; then that is entered as its problem."""
    for part in parts:
        try:
            _ = part.tensors
        except (QuantkitError, OSError):
            place, cause = ("folds", "folds") if isinstance(part, Folds) else _of_view(part)
            findings.problem(name, f"not checked: {place} cannot be opened, see {cause}")
            return True
    return False


def _of_view(view: View) -> tuple[str, str]:
    return f"the {view.name} view", f"headers of {view.name}"


def check_each(sample: Sequence[TensorRecord], check: Callable[[TensorRecord], None], section: Section) -> None:
    """Check weights one by one; a cause that several of them meet is one problem with their count."""
    failed: Counter[tuple[str, str | None]] = Counter()
    for record in sample:
        try:
            check(record)
        except QuantkitError as problem:
            failed[problem.what, problem.where] += 1
    for (what, where), count in failed.items():
        section.problem(what if count == 1 else f"{what} ({count} of {len(sample)} not checked)", where)
