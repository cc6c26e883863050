"""Gate files: find them by name or path, read them strictly."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from pydantic import ValidationError

from quantkit.errors import UsageError
from quantkit.recipe.document import parse_mapping, read_bytes
from quantkit.recipe.errors import nearest, problems_of

from ..bundled import bundled
from .schema import Gate

FOLDER = "gates"


def gate_names() -> list[str]:
    """Names of the gates that come with quantkit, sorted."""
    return sorted(path.stem for path in bundled(FOLDER).glob("*.yaml"))


def find_gate(name_or_path: str | Path) -> Gate:
    """A gate by bundled name (``default``) or by the path of a YAML file.

    A name wins over a file of the same name in the working directory; write ``./default`` for the file.

    Raises:
        UsageError: no such gate, or what ``load_gate`` refuses.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, str) and text in gate_names():
        return load_gate(bundled(FOLDER) / f"{text}.yaml")
    if not Path(name_or_path).exists():
        raise UsageError(
            f"no gate or file {text!r}", where="--gate",
            accepted=f"{', '.join(gate_names())} or the path of a YAML file",
            hint=nearest(text, gate_names()) if "/" not in text else None,
        )  # fmt: skip
    return load_gate(Path(name_or_path))


def load_gate(path: Path) -> Gate:
    """The gate in a YAML file.

    Raises:
        UsageError: unreadable, or not following the schema (all problems in one message).
    """
    data = read_bytes(path, noun="gate", error=UsageError)
    plain, lines = parse_mapping(data, where=str(path), error=UsageError)
    try:
        gate = Gate.model_validate(plain)
    except ValidationError as error:
        raise UsageError(problems_of(error, Gate, lines), where=str(path)) from None
    return gate.with_digest(sha256(data).hexdigest())
