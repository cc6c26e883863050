"""The sections of a recipe; see ``recipe.py`` for the whole and for the rules that they share."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ..errors import UsageError
from ..scheme import DECODE_SCHEMES
from ..units import parse_bytes

CALIBRATED_METHODS = frozenset({"gptq", "awq", "gptq+awq", "autoround"})  # the others look at the weights alone
DATA_FREE_METHOD = "mse"  # the best of those, where nothing is to be calibrated
FOLDING_METHODS = frozenset({"awq", "gptq+awq"})  # these move scales from up to down
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


def _valid_pattern(pattern: str) -> str:
    return _valid_patterns((pattern,))[0]


Patterns = Annotated[tuple[str, ...], AfterValidator(_valid_patterns)]


class Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


Engine = Literal["quantkit", "llmcompressor"]
Method = Literal["gptq", "awq", "gptq+awq", "mse", "rtn", "autoround"]
GroupSize = Literal[32, 64, 128]


class SourceSection(Closed):
    """The published checkpoint that the recipe was written for."""

    repo: str | None = Field(
        default=None, description="Hub repository or bundled name, for example zai-org/GLM-5.2-FP8."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit; null for the newest.")


class DecodeSection(Closed):
    """The decode view: what becomes INT4 and what stays."""

    scheme: Annotated[str, AfterValidator(_known_scheme)] = Field(
        default="int4",
        description="Weight format of the quantized modules.",
        json_schema_extra={"enum": [*sorted(DECODE_SCHEMES)]},
    )
    group_size: GroupSize = Field(default=32, description="Input features that share one BF16 scale.")
    method: Method = Field(
        default="gptq",
        description="gptq compensates the error with calibration data, awq moves scales from up to down by it, "
        "gptq+awq does both, mse searches the scale of each group, rtn takes absmax / 7.5. Outside of experts "
        "nothing is moved: awq searches scales by calibration data, and gptq+awq is gptq. "
        "autoround (engine llmcompressor only) learns rounding and clipping by gradients.",
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
        default="keep",
        description="Modules of multi-token-prediction layers. Calibrated methods learn from what these get: "
        "the embedding of a later token, and what the layers before gave.",
    )
    layers: Annotated[tuple[int, ...] | None, BeforeValidator(parse_layers)] = Field(
        default=None, description="Only these layers are quantized, for example 3-10,12; null for all."
    )
    quantize: Patterns = Field(default=(), description="Regular expressions of further modules to quantize.")
    keep: Patterns = Field(default=(), description="Regular expressions of modules never to quantize.")


class Override(Closed):
    """Modules that are treated otherwise; the first entry whose pattern is found in a module's name counts."""

    pattern: Annotated[str, AfterValidator(_valid_pattern)] = Field(
        min_length=1, description="Regular expression, searched in module names."
    )
    method: Method | None = Field(default=None, description="Another method; null for that of the section decode.")
    group_size: GroupSize | None = Field(default=None, description="Another group size; null likewise.")
    keep: bool = Field(default=False, description="Not quantized at all.")

    @model_validator(mode="after")
    def _says_something(self) -> Override:
        if self.keep == bool(self.method or self.group_size):
            raise ValueError("an override takes either keep: true, or a method, a group_size or both")
        return self


Error = Annotated[float, Field(gt=0, lt=1)]


class ProjectionErrors(Closed):
    """Limits by projection; one that is left out has none."""

    gate: Error | None = Field(default=None, description="Limit of gate (w1).")
    up: Error | None = Field(default=None, description="Limit of up (w3).")
    down: Error | None = Field(default=None, description="Limit of down (w2).")

    @model_validator(mode="after")
    def _says_something(self) -> ProjectionErrors:
        if self.gate is self.up is self.down is None:
            raise ValueError("no limit is given; accepted: one number, or at least one of gate, up and down")
        return self


Action = Literal["retry", "keep-fp8", "fail"]


def _actions(value: object) -> object:
    return value if isinstance(value, (list, tuple)) else (value,)


def _known_order(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    if actions not in {("fail",), ("keep-fp8",), ("retry",), ("retry", "keep-fp8"), ("retry", "fail")}:
        raise ValueError("accepted: fail, keep-fp8, retry, [retry, keep-fp8]")
    return ("retry",) if actions == ("retry", "fail") else actions


class BudgetSection(Closed):
    """What a quantized weight of a routed expert may lose, and what happens when it loses more."""

    max_relative_error: Error | ProjectionErrors = Field(
        description="Largest relative error of a weight, root of squared error over squares: one number, "
        "or gate, up and down."
    )
    action: Annotated[tuple[Action, ...], BeforeValidator(_actions), AfterValidator(_known_order)] = Field(
        default=("fail",),
        description="fail; keep-fp8 leaves the whole layer as the source has it (one format for all experts of a "
        "layer, as engines need); retry tries the weight again with other settings first, then fails or, as "
        "[retry, keep-fp8], keeps.",
    )

    def limit(self, projection: str | None) -> float | None:
        """Largest relative error of a weight of ``gate``, ``up`` or ``down``; None: any."""
        errors = self.max_relative_error
        if isinstance(errors, float):
            return errors
        return {"gate": errors.gate, "up": errors.up, "down": errors.down}.get(projection or "")

    @property
    def retries(self) -> bool:
        return "retry" in self.action

    @property
    def keeps(self) -> bool:
        """A layer over the limit stays as the source has it; else it is an error."""
        return "keep-fp8" in self.action


class CalibrationSection(Closed):
    """What a calibrated method learns from; only together with one (``CALIBRATED_METHODS``).

    The default of 128 samples of 256 tokens is what the bundled text holds for every usual tokenizer, and some
    1,000 tokens per expert where 8 of 256 are active.
    """

    data: str = Field(
        default=BUNDLED_TEXT, min_length=1,
        description="bundled (public-domain English), the path of a .txt or .jsonl file or a directory of them, "
        "seen from the working directory, or a data set of the Hub: org/name[@revision][/path][:split].",
    )  # fmt: skip
    samples: int = Field(default=128, ge=1, description="Number of samples.")
    length: int = Field(default=256, ge=2, description="Tokens of one sample.")
    seed: int = Field(default=0, ge=0, description="Chooses the samples where the text holds more.")
    min_tokens: int = Field(
        default=512, ge=0,
        description="An expert that sees fewer tokens borrows the rest from the average input of its layer.",
    )  # fmt: skip
    route_all: bool | None = Field(
        default=None,
        description="Every expert learns from all tokens instead of those routed to it; null for what the engine "
        "does: quantkit false, llmcompressor true and nothing else.",
    )
    down_inputs: Literal["quantized", "original"] = Field(
        default="quantized",
        description="down learns from its input behind the quantized or the original gate and up; outside of "
        "experts every linear does so behind those before it in its layer.",
    )
    propagate: Literal["quantized", "original"] = Field(
        default="quantized", description="Which weights of a layer make the input of the next one."
    )
    percdamp: float = Field(
        default=0.01,
        gt=0,
        le=1,
        description="Least dampening as a share of the mean diagonal of the Hessian; few tokens make it more "
        "(shrinkage of Ledoit and Wolf).",
    )


class PrefillSection(Closed):
    """The prefill view: the publisher's FP8 files, or FP8 derived from BF16 or INT4."""

    place: Literal["auto", "link", "copy", "reference"] = Field(
        default="auto", description="How the publisher's files get into the artifact; changes no byte."
    )
    make_fp8: bool = Field(default=False, description="Derive FP8 for a source that is BF16 or native INT4.")


class OutputSection(Closed):
    """Layout of the files that are written."""

    max_shard_size: Annotated[str, BeforeValidator(_size_text)] = Field(
        default="10GB", description="Largest weight file, with unit; GB is 10^9 and GiB is 2^30 bytes."
    )

    @property
    def max_shard_bytes(self) -> int:
        return parse_bytes(self.max_shard_size)
