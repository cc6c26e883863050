"""The error tree; the CLI's one boundary maps it to exit codes.

::

    QuantkitError
    ├── UsageError            2   an option or argument that cannot work
    │   └── RecipeError       2   a recipe or plan file that is not valid
    ├── SourceError           3   the input checkpoint: unsupported, incomplete or corrupt
    │   └── UnsupportedError  3   well-formed, but not something quantkit handles
    ├── ArtifactError         3   not an artifact, or one that cannot be used
    ├── EnvironmentProblem    4   disk, memory, device, network, missing extra
    ├── GateFailed            1   a check that was asked for did not hold (verify, evaluation, quality budget)
    └── Interrupted         130   stopped by the user; resumable

Every error says what is wrong and where, which value was seen, what is accepted and what to do. The parts
are keyword arguments so that no call site forgets one silently and ``--json`` can print them apart.
"""

from __future__ import annotations


class QuantkitError(Exception):
    """Base of all errors that quantkit raises on purpose.

    Args:
        what: one sentence naming the problem and the value that was seen.
        where: file, tensor, option or recipe key it concerns.
        accepted: what would have been accepted.
        hint: what the user can do next.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, where: str | None = None, accepted: str | None = None, hint: str | None = None
    ) -> None:
        self.what, self.where, self.accepted, self.hint = what, where, accepted, hint
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.accepted:
            text += f"; accepted: {self.accepted}"
        if self.hint:
            text += f". {self.hint}" if not text.endswith(".") else f" {self.hint}"
        return text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.where, self.accepted, self.hint)


def _rebuild(
    cls: type[QuantkitError], what: str, where: str | None, accepted: str | None, hint: str | None
) -> QuantkitError:
    return cls(what, where=where, accepted=accepted, hint=hint)


class UsageError(QuantkitError):
    """An option or argument that cannot work, alone or together with another."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe or plan file that does not follow its schema, or asks for something forbidden."""


class SourceError(QuantkitError):
    """The source checkpoint is incomplete or corrupt."""

    exit_code = 3


class UnsupportedError(SourceError):
    """The source is well-formed but of a kind that quantkit does not handle."""


class ArtifactError(QuantkitError):
    """A directory that is not an artifact, or an artifact that cannot be used as asked."""

    exit_code = 3


class EnvironmentProblem(QuantkitError):
    """Disk, memory, device, network or a missing optional dependency."""

    exit_code = 4


class GateFailed(QuantkitError):
    """A check that the user asked for did not hold."""

    exit_code = 1


class Interrupted(QuantkitError):
    """Stopped by the user; what is on disk can be resumed."""

    exit_code = 130


class SaidElsewhere(Exception):
    """What failed has been said already: by another process of the run, or beside a result that stands.

    Attributes:
        error: what was said; it decides the exit code.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error
        super().__init__(str(error))
