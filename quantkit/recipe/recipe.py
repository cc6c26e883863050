"""The recipe: what the user asks of a conversion, as one closed, frozen, versioned schema.

Unknown keys are errors, not warnings, because a misspelt option that is ignored costs hours of conversion.
There is deliberately no option that forces a router, norm, embedding, lm_head, indexer, kv_b_proj or bias into
INT4: every public attempt broke the model in ways that short tests do not show.

A section that a method has no use for is an error too: ``calibration`` goes with a calibrated method and is absent
from every other recipe, from its YAML and its digests as well.

What is left out: anything that belongs to one run and changes no byte (output directory, workers, memory).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)

from ..errors import UsageError
from ..scheme import DECODE_SCHEMES
from ..units import parse_bytes

CALIBRATED_METHODS = frozenset({"gptq"})  # the others look at the weights alone
BUNDLED_TEXT = "bundled"


def _known_scheme(name: str) -> str:
    if name not in DECODE_SCHEMES:
        raise ValueError(f"unknown decode scheme {name!r}; known: {', '.join(sorted(DECODE_SCHEMES))}")
    return name


def _valid_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return patterns


def parse_layers(value: object) -> object:
    """Layer numbers from ``"3-10,12"``, ``[3, 4, "7-9"]`` or None (all), sorted and without repeats."""
    if value is None:
        return None
    items = value if isinstance(value, (list, tuple)) else str(value).split(",")
    layers: set[int] = set()
    for item in items:
        match = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", str(item), re.ASCII)
        if isinstance(item, (bool, float)) or match is None:
            raise ValueError(f"{item!r} is not a layer number or a range such as 3-10")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {str(item).strip()} runs backwards")
        layers.update(range(first, last + 1))
    if not layers:
        raise ValueError("the list of layers is empty; leave it out to mean all layers")
    return tuple(sorted(layers))


def _size_text(value: object) -> object:
    # Validated here, kept as the user wrote it: a recipe that is printed should read like the file.
    try:
        parse_bytes(value)  # type: ignore[arg-type]
    except UsageError as error:
        raise ValueError(f"{error.what}; accepted: {error.accepted}") from None
    return str(value)


Patterns = Annotated[tuple[str, ...], AfterValidator(_valid_patterns)]


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class SourceSection(_Closed):
    """The published checkpoint that the recipe was written for."""

    repo: str | None = Field(
        default=None, description="Hub repository or bundled name, for example zai-org/GLM-5.2-FP8."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit; null for the newest.")


class DecodeSection(_Closed):
    """The decode view: what becomes INT4 and what stays."""

    scheme: Annotated[str, AfterValidator(_known_scheme)] = Field(
        default="int4",
        description="Weight format of the quantized modules.",
        json_schema_extra={"enum": [*sorted(DECODE_SCHEMES)]},
    )
    group_size: Literal[32, 64, 128] = Field(default=32, description="Input features that share one BF16 scale.")
    method: Literal["gptq", "mse", "rtn"] = Field(
        default="mse",
        description="gptq compensates the error with calibration data, mse searches the scale of each group, rtn "
        "takes absmax / 7.5.",
    )
    linears: Literal["routed", "all-mlp", "all"] = Field(
        default="routed",
        description="routed: routed experts; all-mlp: shared experts and dense MLPs too; all: attention too. "
        "Never router, norms, indexer, kv_b_proj, embeddings or lm_head.",
    )
    rest: Literal["fp8", "bf16"] = Field(
        default="fp8", description="FP8 modules that are not quantized: kept byte for byte, or expanded to BF16."
    )
    mtp: Literal["keep", "quantize"] = Field(
        default="keep", description="Modules of multi-token-prediction layers."
    )
    layers: Annotated[tuple[int, ...] | None, BeforeValidator(parse_layers)] = Field(
        default=None, description="Only these layers are quantized, for example 3-10,12; null for all."
    )
    quantize: Patterns = Field(default=(), description="Regular expressions of further modules to quantize.")
    keep: Patterns = Field(default=(), description="Regular expressions of modules never to quantize.")


class CalibrationSection(_Closed):
    """What a calibrated method learns from; only together with one (``CALIBRATED_METHODS``).

    The default of 128 samples of 256 tokens is what the bundled text holds for every usual tokenizer, and some
    1,000 tokens per expert where 8 of 256 are active.
    """

    data: str = Field(
        default=BUNDLED_TEXT, min_length=1,
        description="bundled (public-domain English), or the path of a .txt or .jsonl file or a directory of "
        "them, seen from the working directory.",
    )  # fmt: skip
    samples: int = Field(default=128, ge=1, description="Number of samples.")
    length: int = Field(default=256, ge=2, description="Tokens of one sample.")
    seed: int = Field(default=0, ge=0, description="Chooses the samples where the text holds more.")
    min_tokens: int = Field(
        default=128, ge=0,
        description="An expert that sees fewer tokens borrows the rest from the average input of its layer.",
    )  # fmt: skip
    propagate: Literal["quantized", "original"] = Field(
        default="quantized", description="Which weights of a layer make the input of the next one."
    )
    percdamp: float = Field(
        default=0.01, gt=0, le=1, description="Dampening as a share of the mean diagonal of the Hessian."
    )


class PrefillSection(_Closed):
    """The prefill view: the publisher's FP8 files, or FP8 derived from BF16 or INT4."""

    place: Literal["auto", "link", "copy", "reference"] = Field(
        default="auto", description="How the publisher's files get into the artifact; changes no byte."
    )
    make_fp8: bool = Field(default=False, description="Derive FP8 for a source that is BF16 or native INT4.")


class OutputSection(_Closed):
    """Layout of the files that are written."""

    max_shard_size: Annotated[str, BeforeValidator(_size_text)] = Field(
        default="10GB", description="Largest weight file, with unit; GB is 10^9 and GiB is 2^30 bytes."
    )

    @property
    def max_shard_bytes(self) -> int:
        return parse_bytes(self.max_shard_size)


# Option names of the CLI and of with_options -> where they live.
OPTIONS: dict[str, tuple[str, ...]] = {
    "name": ("name",), "description": ("description",), "family": ("family",),
    "repo": ("source", "repo"), "revision": ("source", "revision"),
    **{k: ("decode", k) for k in DecodeSection.model_fields},
    "calibration": ("calibration", "data"),
    **{k: ("calibration", k) for k in CalibrationSection.model_fields if k != "data"},
    **{k: ("prefill", k) for k in PrefillSection.model_fields},
    "max_shard_size": ("output", "max_shard_size"),
}  # fmt: skip


class Recipe(_Closed):
    """One conversion, described; see the sections for their fields."""

    schema_version: Literal[1] = Field(description="Version of this schema.")
    name: str = Field(min_length=1, description="Short name of the recipe.")
    description: str = Field(default="", description="One sentence for people.")
    family: str | None = Field(default=None, description="Family table to use; null to choose by model_type.")
    source: SourceSection = SourceSection()
    decode: DecodeSection = DecodeSection()
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
        decode: DecodeSection | None = info.data.get("decode")
        if decode is None:  # not valid, which has been told
            return value
        if decode.method in CALIBRATED_METHODS:
            return value or CalibrationSection()
        if value is not None:
            raise ValueError(
                f"the method {decode.method} uses no calibration data; leave the calibration options out, or "
                f"choose a method that does ({', '.join(sorted(CALIBRATED_METHODS))})"
            )
        return None

    @model_serializer(mode="wrap")
    def _without_absent_section(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        if self.calibration is None:
            data.pop("calibration", None)
        return data

    def content(self) -> dict[str, Any]:
        """The part that affects the bytes of the core, JSON-ready and canonical.

        Left out: name, description and source (the digest of the source's tensors stands for it),
        ``calibration.data`` (the digest of the calibration set stands for it), and ``prefill.place``, which only
        says how unchanged files get to their place.
        """
        decode = self.decode.model_dump(mode="json")
        decode["quantize"], decode["keep"] = sorted(set(decode["quantize"])), sorted(set(decode["keep"]))
        calibration = self.calibration and {
            "calibration": self.calibration.model_dump(mode="json", exclude={"data"})
        }
        return {
            "schema_version": self.schema_version,
            "family": self.family,
            "decode": decode,
            **(calibration or {}),
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
        method = options.get("method") or self.decode.method
        if method not in CALIBRATED_METHODS and "calibration" not in sections_given:
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
