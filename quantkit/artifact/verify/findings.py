"""What verification found: one ``Check`` for everything looked at, all problems and not only the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import QuantkitError

MOST_PER_CHECK = 50  # a truncated file breaks thousands of tensors; the first ones say it all


@dataclass(frozen=True, slots=True)
class Check:
    """One judgement.

    Attributes:
        name: what was checked: ``manifest``, ``files``, ``attachments``, ``marks``, ``records``, ``budget``,
            ``headers``, ``pairing``, ``scales``, ``error``, ``engines``, ``source``.
        ok: it held. A check that was not made is ok and ``skipped``.
        detail: what was seen.
        where: file, tensor or module; None for the artifact as a whole.
    """

    name: str
    ok: bool
    detail: str
    where: str | None = None
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All checks of one artifact."""

    path: Path
    checks: list[Check]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def problems(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]

    def to_json(self) -> dict[str, Any]:
        return {
            "artifact": str(self.path), "ok": self.ok,
            "checks": [
                {"name": c.name, "ok": c.ok, "detail": c.detail, "where": c.where, "skipped": c.skipped}
                for c in self.checks
            ],
        }  # fmt: skip


@dataclass(slots=True)
class Findings:
    """Collects checks; a section that found no problem leaves one line that says what it looked at."""

    checks: list[Check] = field(default_factory=list)

    def problem(self, name: str, detail: str, where: str | None = None) -> None:
        self.checks.append(Check(name, False, detail, where))

    def skip(self, name: str, why: str) -> None:
        self.checks.append(Check(name, True, f"not checked: {why}", skipped=True))

    @contextmanager
    def section(self, name: str) -> Iterator[Section]:
        """Problems of one kind. An error inside is a problem too: a damaged artifact never raises."""
        section = Section(name)
        try:
            yield section
        except QuantkitError as error:
            section.problem(error.what, error.where)
        except MemoryError:
            raise  # says nothing of the artifact
        except Exception as error:
            section.problem(f"could not be checked: {type(error).__name__}: {error}")
        self.checks += section.close()


@dataclass(slots=True)
class Section:
    """The problems of one kind, counted, the first of them kept."""

    name: str
    summary: str = "holds"
    _problems: list[Check] = field(default_factory=list)
    _num_problems: int = 0

    def problem(self, detail: str, where: str | None = None) -> None:
        self._num_problems += 1
        if len(self._problems) < MOST_PER_CHECK:
            self._problems.append(Check(self.name, False, detail, where))

    def close(self) -> list[Check]:
        if not self._num_problems:
            return [Check(self.name, True, self.summary)]
        if self._num_problems > len(self._problems):
            more = self._num_problems - len(self._problems)
            return [*self._problems, Check(self.name, False, f"and {more:,} further problems of this kind")]
        return self._problems
