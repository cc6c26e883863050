"""The shape of a run's files as closed, strict schemas: numbers are finite, never text or truth values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

from quantkit.artifact.canonical import canonical_json

from .run import Kind

Name = Annotated[str, Field(min_length=1)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """Python reads NaN, infinities and halves of surrogate pairs, which no report could be written with."""
    try:
        canonical_json(found).decode()
    except UnicodeDecodeError:
        raise ValueError("holds half of a surrogate pair, which is no text") from None
    except (ValueError, RecursionError):
        raise ValueError("holds a number that is not finite") from None
    return found


Plain = Annotated[dict[str, Any], AfterValidator(_plain)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class MetricEntry(Strict):
    name: Name
    kind: Kind
    is_higher_better: bool
    unit: str = ""
    is_of_pair: bool = False


class SkippedEntry(Strict):
    item: Name
    reason: str


class PointEntry(Strict):
    start: int
    stop: int
    value: FiniteFloat
    stderr: FiniteFloat


class TaskEntry(Strict):
    name: Name
    version: Name
    path: Literal["prefill", "decode", "generate", "unknown"]
    metrics: list[MetricEntry]
    skipped: list[SkippedEntry] = []
    curves: dict[str, list[PointEntry]] = {}


class ItemsEntry(Strict):
    count: Annotated[int, Field(ge=0)]
    bytes: Annotated[int, Field(ge=0)]
    sha256: Digest


class Header(Strict):
    """``run.json``."""

    format: str
    format_version: int
    candidate: Plain
    settings: Plain
    tasks: list[TaskEntry]
    items: ItemsEntry


class ItemLine(Strict):
    """One line of ``items.jsonl``."""

    task: Name
    item: Name
    cluster: Name
    prompt_sha256: Digest
    values: dict[str, FiniteFloat]
    weights: dict[str, FiniteFloat] = {}
    context_tokens: Annotated[int, Field(ge=0)] | None = None
