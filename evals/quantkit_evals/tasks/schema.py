"""A task file as a closed schema: which kind of task, where its items are, and how fields of theirs are called.

``kind`` and ``data`` are enough when the items have the fields that the kind wants:

    choice       context, choices (a list), answer (index from 0, or the choice itself)
    cloze        context, target
    perplexity   text
    generate     prompt, and target or json_schema (of the answer), or both

Other fields are said by name (``context: question``) or in a template (``context: "Q: {{question}}"``). ``id``
and ``cluster`` are taken from the items where they have them. Items of one cluster depend on each other (one
document), and the statistics know it.

Unknown keys are errors: a misspelt one that is ignored would change what is measured, silently. Left out:
few-shot examples and filters of answers; who needs them writes a task for lm-eval, and names it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Kind = Literal["choice", "cloze", "perplexity", "generate"]

FIELDS: dict[str, tuple[str, ...]] = {
    "choice": ("context", "choices", "answer"),
    "cloze": ("context", "target"),
    "perplexity": ("text",),
    "generate": ("prompt", "target"),
}
METRICS: dict[str, tuple[str, ...]] = {
    "choice": ("acc", "acc_norm", "acc_mutual_info"),
    "cloze": ("acc", "perplexity"),
    "perplexity": ("word_perplexity", "byte_perplexity"),
    "generate": ("exact_match", "valid", "field_match"),
}
NAME = r"[A-Za-z0-9][A-Za-z0-9_+-]{0,63}"
FIELD = re.compile(r"\{\{\s*(\w+)\s*\}\}")
Text = Annotated[str, Field(min_length=1)]
_GENERATE = ("json_schema", "until", "max_tokens")


def _template(source: object) -> object:
    """A source whose double braces are all of ``{{field}}``: what looks like one and is none would be asked
    literally. Those that end JSON have begun in it."""
    if isinstance(source, str):
        rest = FIELD.sub("\0", source)
        if "{{" in rest or ("}}" in rest and rest.count("{") < rest.count("}")):
            at = rest.find("{{") if "{{" in rest else max(rest.find("}}") - 20, 0)
            raise ValueError(f"{rest[at : at + 40]!r} has braces that are no {{{{field}}}}; there is nothing else")
    return source


def _texts(value: object) -> object:
    """A text or a list of two or more; one message instead of one for each side of a union."""
    if isinstance(value, str) and value:
        return _template(value)
    if isinstance(value, list) and len(value) > 1 and all(isinstance(text, str) and text for text in value):
        return [_template(text) for text in value]
    raise ValueError("a field's name or a list of two or more templates is wanted")


Source = Annotated[str, Field(min_length=1), BeforeValidator(_template)]


def _entry(value: object) -> object:
    return {"task": value} if isinstance(value, str) else value


class TaskFile(BaseModel):
    """What a task's YAML says."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Kind = Field(description="What is asked, and how it is scored.")
    data: Text = Field(description="JSON lines in UTF-8, in the folder of this file or below it.")
    name: str | None = Field(default=None, pattern=rf"^{NAME}$", description="By default the file's name.")
    description: str = Field(default="", description="One line for people.")
    context: Source | None = Field(default=None, description="choice, cloze: what comes before. A template.")
    choices: Annotated[Any, BeforeValidator(_texts)] = Field(
        default=None, description="choice: the field that holds the list, or a list: a template for each choice."
    )
    answer: Source | None = Field(default=None, description="choice: the field that holds the answer.")
    target: Source | None = Field(default=None, description="cloze, generate: what should come. A template.")
    text: Source | None = Field(default=None, description="perplexity: a template.")
    prompt: Source | None = Field(default=None, description="generate: a template.")
    id: Source | None = Field(
        default=None, description="The field that names an item; by default id, if it is there."
    )
    cluster: Source | None = Field(
        default=None, description="The field that items of one document share; by default cluster, if it is there."
    )
    delimiter: str = Field(default=" ", description="Between the context and a choice or target.")
    json_schema: dict[str, Any] | None = Field(
        default=None, description="generate: JSON Schema of all answers; an item's own json_schema wins."
    )
    until: list[Text] | None = Field(default=None, description="generate: texts that end an answer.")
    max_tokens: int | None = Field(default=None, ge=1, le=65536, description="generate: of an answer.")
    metrics: list[str] | None = Field(
        default=None, description="The first one is the main one. By default all that the items allow."
    )

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        names = {name for fields in FIELDS.values() for name in fields} | set(_GENERATE)
        own = {*FIELDS[self.kind], *(_GENERATE if self.kind == "generate" else ())}
        wrong = sorted(name for name in names - own if getattr(self, name) is not None)
        if wrong:
            raise ValueError(
                f"a task of kind {self.kind} has no {', '.join(wrong)}; it has {', '.join(sorted(own))}"
            )
        for metric in self.metrics or ():
            if metric not in METRICS[self.kind]:
                raise ValueError(
                    f"a task of kind {self.kind} has no metric {metric!r}; it has {', '.join(METRICS[self.kind])}"
                )
        if self.metrics is not None and (not self.metrics or len(set(self.metrics)) < len(self.metrics)):
            raise ValueError("metrics: is empty or has one twice")
        return self

    def source(self, field: str) -> str:
        """Where a field of the kind comes from: what the file says, or the item's field of the same name."""
        return str(getattr(self, field) or field)


class SuiteEntry(BaseModel):
    """One task of a suite with settings of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    task: Text = Field(description="Bundled name, path from the suite's folder, or a name that lm-eval knows.")
    num_fewshot: int | None = Field(default=None, ge=0, le=64, description="Tasks of lm-eval: examples before it.")


class Suite(BaseModel):
    """Tasks that are run together."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    description: str = ""
    tasks: list[Annotated[SuiteEntry, BeforeValidator(_entry)]] = Field(min_length=1)


class Suites(BaseModel):
    """A file of suites by name."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    suites: dict[str, Suite] = Field(min_length=1)
