"""The recipe: what the user asks of a conversion, as one closed, frozen, versioned schema.

Unknown keys are errors, not warnings, because a misspelt option that is ignored costs hours of conversion.
There is deliberately no option that forces a router, norm, embedding, lm_head, indexer, kv_b_proj or bias into
INT4: every public attempt broke the model in ways that short tests do not show.

A section that a method has no use for is an error too: ``calibration`` goes with a calibrated method and is absent
from every other recipe, from its YAML and its digests as well.

What is left out: anything that belongs to one run and changes no byte (output directory, workers, memory).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, ValidationInfo, field_validator, model_serializer

from .sections import (
    CALIBRATED_METHODS,
    BudgetSection,
    CalibrationSection,
    Closed,
    DecodeSection,
    Engine,
    OutputSection,
    Override,
    PrefillSection,
    SourceSection,
)

# Option names of the CLI and of with_options -> where they live.
OPTIONS: dict[str, tuple[str, ...]] = {
    **{k: (k,) for k in ("name", "description", "family", "engine", "overrides", "budget")},
    "repo": ("source", "repo"), "revision": ("source", "revision"),
    **{k: ("decode", k) for k in DecodeSection.model_fields},
    "calibration": ("calibration", "data"),
    **{k: ("calibration", k) for k in CalibrationSection.model_fields if k != "data"},
    **{k: ("prefill", k) for k in PrefillSection.model_fields},
    "max_shard_size": ("output", "max_shard_size"),
}  # fmt: skip


# Left out of YAML and digests where they say nothing.
_ABSENT: dict[str, Any] = {"engine": "quantkit", "overrides": (), "budget": None, "calibration": None}


def _method(override: object) -> object:
    """Of an override that may not be validated yet."""
    return override.get("method") if isinstance(override, Mapping) else getattr(override, "method", None)


class Recipe(Closed):
    """One conversion, described; see the sections for their fields."""

    schema_version: Literal[1] = Field(description="Version of this schema.")
    name: str = Field(min_length=1, description="Short name of the recipe.")
    description: str = Field(default="", description="One sentence for people.")
    family: str | None = Field(default=None, description="Family table to use; null to choose by model_type.")
    engine: Engine = Field(
        default="quantkit",
        description="What quantizes: quantkit itself, or llm-compressor's own gptq or autoround, which holds the "
        "whole model in memory (extra llmcompressor).",
    )
    source: SourceSection = SourceSection()
    decode: DecodeSection = DecodeSection()
    overrides: tuple[Override, ...] = Field(default=(), description="Modules that are treated otherwise.")
    budget: BudgetSection | None = Field(
        default=None, description="Quality budget of the routed experts; null for none."
    )
    calibration: CalibrationSection | None = Field(
        default=None, validate_default=True,
        description="Only with a calibrated method, which takes the defaults of this section without it.",
    )  # fmt: skip
    prefill: PrefillSection = PrefillSection()
    output: OutputSection = OutputSection()

    @field_validator("calibration", mode="after")
    @classmethod
    def _goes_with_the_method(
        cls, value: CalibrationSection | None, info: ValidationInfo
    ) -> CalibrationSection | None:
        if not info.data.keys() >= {"decode", "overrides"}:  # not valid, which has been told
            return value
        decode: DecodeSection = info.data["decode"]
        if CALIBRATED_METHODS & {decode.method, *(o.method for o in info.data["overrides"])}:
            return value or CalibrationSection()
        if value is not None:
            raise ValueError(
                f"the method {decode.method} uses no calibration data; leave the calibration options out, or "
                f"choose a method that does ({', '.join(sorted(CALIBRATED_METHODS))})"
            )
        return None

    @model_serializer(mode="wrap")
    def _without_absent_sections(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        return {k: v for k, v in data.items() if k not in _ABSENT or v not in (_ABSENT[k], [])}

    def content(self) -> dict[str, Any]:
        """The part that affects the bytes of the core, JSON-ready and canonical.

        Left out: name, description and source (the digest of the source's tensors stands for it),
        ``calibration.data`` (the digest of the calibration set stands for it), ``engine`` (the manifest and
        ``pair_id`` have it beside this, with the version that ran), and ``prefill.place``, which only says how
        unchanged files get to their place.
        """
        decode = self.decode.model_dump(mode="json")
        decode["quantize"], decode["keep"] = sorted(set(decode["quantize"])), sorted(set(decode["keep"]))
        sections: dict[str, Any] = {}
        if self.overrides:
            sections["overrides"] = [override.model_dump(mode="json") for override in self.overrides]
        if self.budget is not None:
            sections["budget"] = self.budget.model_dump(mode="json")
        if self.calibration is not None:
            sections["calibration"] = self.calibration.model_dump(mode="json", exclude={"data"})
        return {
            "schema_version": self.schema_version,
            "family": self.family,
            "decode": decode,
            **sections,
            "prefill": {"make_fp8": self.prefill.make_fp8},
            "output": {"max_shard_bytes": self.output.max_shard_bytes},
        }

    def with_options(self, **options: object) -> Recipe:
        """A new recipe in which the given options are set; None leaves an option as it is.

        A data-free ``method`` takes the place of a calibrated one together with its calibration section, unless
        calibration options are given beside it, which is an error.

        Args:
            options: fields by their own name, without section (``group_size=64``, ``place="copy"``);
                ``calibration`` is ``calibration.data``.

        Raises:
            RecipeError: unknown option or invalid value, all of them in one message.
        """
        from .errors import unknown_option
        from .validate import validate

        data = self.model_dump(mode="json")
        sections_given = {OPTIONS[k][0] for k, v in options.items() if v is not None and k in OPTIONS}
        given = options.get("overrides")
        overrides = given if isinstance(given, (list, tuple)) else self.overrides
        methods = {options.get("method") or self.decode.method, *map(_method, overrides)}
        if not methods & CALIBRATED_METHODS and "calibration" not in sections_given:
            data.pop("calibration", None)
        for option, value in options.items():
            if option not in OPTIONS:
                raise unknown_option(option, OPTIONS)
            if value is None:
                continue
            *sections, key = OPTIONS[option]
            target = data
            for section in sections:
                target = target.setdefault(section, {})
            target[key] = list(value) if isinstance(value, tuple) else value
        return validate(data, where=f"options of recipe {self.name}")
