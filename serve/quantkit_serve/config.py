"""What a server is started with: frozen, resolved once, shown by /version and in the log.

Legend: S tokens in a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightSet = Literal["dual", "fp8", "int4"]
KvDtype = Literal["fp8", "bf16", "f32"]
Compute = Literal["bfloat16", "float32"]


@dataclass(frozen=True)
class ModelConfig:
    """How the model computes.

    Attributes:
        weights: ``dual`` prefills on the prefill view and decodes on the decode view; ``fp8`` and ``int4`` use one
            of them for both phases.
        compute: ``bfloat16`` runs quantkit_kernels; ``float32`` runs plain torch on dequantized weights, for
            comparison with a reference, slow and large.
        prefill_kv: ``rounded`` lets a chunk attend to its own keys and values as the pages hold them, so that
            chunk boundaries and prefix hits don't change results; ``fresh`` keeps them in BF16.
        fp8_activations: ``dynamic128`` rounds the inputs of FP8 linears to e4m3, 128 values to a scale, as engines
            on GPUs do; ``none`` keeps them in BF16 (W8A16).
        deterministic: a row's bits depend on nothing but its own request.
        speculative: ``mtp`` proposes tokens with the model's multi-token-prediction layer, and computes several of
            a greedy request in one decode step; answers stay what they are.
        num_speculative_tokens: tokens that are proposed, the second and further ones by applying the layer again.
    """

    weights: WeightSet = "dual"
    compute: Compute = "bfloat16"
    prefill_kv: Literal["rounded", "fresh"] = "rounded"
    fp8_activations: Literal["none", "dynamic128"] = "none"
    deterministic: bool = False
    speculative: Literal["off", "mtp"] = "off"
    num_speculative_tokens: int = 1


@dataclass(frozen=True)
class CacheConfig:
    """The pool of KV pages.

    Attributes:
        kv_dtype: of the pages; ``f32`` only with float32 compute, which takes ``bf16`` too.
        page_size: S.
        kv_bytes: memory of the pool; the number of pages follows from the model.
        has_tags: check page ownership before every step that touches paged history.
        has_prefix_cache: requests share the pages of equal prompts.
    """

    kv_dtype: KvDtype = "fp8"
    page_size: int = 64
    kv_bytes: int = 1 << 30
    has_tags: bool = True
    has_prefix_cache: bool = True


@dataclass(frozen=True)
class SchedulerConfig:
    """Who runs when.

    Attributes:
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: prompt tokens of one prefill step, over all its sequences.
        decode_steps_between_chunks: decode steps that running sequences get between two prefill steps; bounds the
            latency between tokens by one prefill step and one decode step.
        max_waiting: requests that may wait, besides those for which there is room; more are refused.
        max_model_len: tokens of prompt and answer; None: what the model was trained for.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    decode_steps_between_chunks: int = 1
    max_waiting: int = 1024
    max_model_len: int | None = None


@dataclass(frozen=True)
class EngineConfig:
    """Everything below HTTP."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
