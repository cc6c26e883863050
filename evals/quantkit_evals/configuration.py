"""What is under test: which weights, which KV cache, and by which path a figure was made.

Scoring a text as usual (all of it in one prefill) never enters decode: it says nothing about the INT4 weights of
a dual artifact, nor about FP8 pages. So a figure of ``dual``, and any figure that is to speak for FP8 pages, is
*decode-forced*: the context is prefilled, the continuation goes token by token through decode steps. The path is
part of the configuration and of every report.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

WeightSet = Literal["dual", "fp8", "int4"]
KvDtype = Literal["fp8", "bf16", "f32"]
Path = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One configuration of our engine.

    Attributes:
        weights: ``fp8`` and ``int4`` use one view for both phases, ``dual`` prefills on FP8 and decodes on INT4.
        kv_dtype: of the KV pages; ``f32`` only with float32 compute.
        path: how continuations are scored: ``prefill`` all at once, ``decode`` token by token.
        compute: arithmetic, as ``quantkit serve --dtype``.
        fp8_activations: as ``quantkit serve --fp8-activations``.
    """

    weights: WeightSet
    kv_dtype: KvDtype = "bf16"
    path: Path = "decode"
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    fp8_activations: Literal["none", "dynamic128"] = "none"

    @property
    def needs_decode(self) -> bool:
        """Whether figures of the prefill path would not show what is under test."""
        return self.weights == "dual" or self.kv_dtype == "fp8"

    def __str__(self) -> str:
        activations = "W8A16" if self.fp8_activations == "none" else "W8A8 dynamic128"
        return f"{self.weights}, {self.kv_dtype} KV, {self.path} path, {self.compute}, {activations}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
