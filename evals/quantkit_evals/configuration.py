"""What is under test: which weights, which KV cache, and by which path a figure was made.

Scoring a text as usual (all of it in one prefill) never enters decode: it says nothing about the INT4 weights of
a dual artifact, nor about FP8 pages. So a figure of ``dual``, and any figure that is to speak for FP8 pages, is
*decode-forced*: the context is prefilled, the continuation goes token by token through decode steps. The path is
part of the configuration and of every report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

WeightSet = Literal["dual", "fp8", "int4"]
KvDtype = Literal["fp8", "bf16", "f32"]
Path = Literal["prefill", "decode"]
Compute = Literal["bfloat16", "float32"]
Activations = Literal["none", "dynamic128"]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One configuration of our engine.

    Attributes:
        weights: ``fp8`` and ``int4`` use one view for both phases, ``dual`` prefills on FP8 and decodes on INT4. A
            plain checkpoint has one set: ``int4`` where it stores that, else ``fp8``, also of BF16 weights.
        kv_dtype: of the KV pages; ``f32`` only with float32 compute.
        path: how continuations are scored: ``prefill`` all at once, ``decode`` token by token.
        compute: arithmetic, as ``quantkit serve --dtype``.
        fp8_activations: as ``quantkit serve --fp8-activations``.
    """

    weights: WeightSet
    kv_dtype: KvDtype = "bf16"
    path: Path = "decode"
    compute: Compute = "bfloat16"
    fp8_activations: Activations = "none"

    @classmethod
    def of_json(cls, stated: object) -> Self | None:
        """As a run states it; None where that is no configuration that this version knows."""
        if not isinstance(stated, Mapping) or stated.keys() - _KNOWN.keys() or "weights" not in stated:
            return None
        if any(not isinstance(value, str) or value not in _KNOWN[name] for name, value in stated.items()):
            return None
        return cls(**stated)

    @property
    def needs_decode(self) -> bool:
        """Whether figures of the prefill path would not show what is under test."""
        return self.weights == "dual" or self.kv_dtype == "fp8"

    def __str__(self) -> str:
        activations = "W8A16" if self.fp8_activations == "none" else "W8A8 dynamic128"
        return f"{self.weights}, {self.kv_dtype} KV, {self.path} path, {self.compute}, {activations}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_KNOWN: dict[str, tuple[str, ...]] = {
    "weights": get_args(WeightSet), "kv_dtype": get_args(KvDtype), "path": get_args(Path),
    "compute": get_args(Compute), "fp8_activations": get_args(Activations),
}  # fmt: skip
