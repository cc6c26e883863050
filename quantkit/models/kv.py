"""Bytes that one token occupies in the KV cache, in BF16 and in FP8: ours, and the figures others quote.

There is no single "FP8 KV" size. e4m3 without scales is the number most often quoted (one byte per channel),
but it is 22 to 56 % wrong when values are not near 1, so quantkit does not offer it; pages carry their scales and
are that much larger. Both are computed here, so that a figure from elsewhere can be recognised.

Per token and layer (docs/format.md section 5):

=====================  ==========================================  =====================================
what                   FP8, ours                                   BF16
=====================  ==========================================  =====================================
MLA latent             ``kv_lora`` e4m3 + a float32 scale per 128  ``2 * (kv_lora + rope)``
                       channels + ``rope`` in BF16  (512+16+128)   (1152 for 512 + 64)
DSA indexer key        ``d`` e4m3 + a float32 scale per 128        ``2 * d`` (256); only on layers that
                       (128 + 4); only on layers that run one      run an indexer
GQA                    per head and for K and V: ``head_dim``      per head and for K and V:
                       e4m3 + one float32 scale                    ``2 * head_dim``
=====================  ==========================================  =====================================

Quoted elsewhere: ``plain_fp8`` counts a byte per cached channel and nothing else; ``engine_*`` is what SGLang and
vLLM allocate for DSA models: the ``fp8_ds_mla`` layout (656 B) and 132 B of FP8 indexer key *on every layer*, also
on layers that share another's indexer, and in BF16 mode too. Multi-token-prediction layers are not counted.
Sliding windows are not either: the figure is then an upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import IndexerShape, MlaShape, TextShape, text_shape

SCALE_BYTES = 4  # float32
SCALE_CHANNELS = 128  # channels that share a scale in the latent and in the indexer key


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes per token over all layers, on one GPU without tensor parallelism.

    Attributes:
        kind: ``mla``, ``mla+dsa`` or ``gqa``.
        bf16, fp8: quantkit's page formats, without page headers.
        plain_bf16, plain_fp8: cached channels times two or one byte; no scales, no indexer keys.
        engine_bf16, engine_fp8: as SGLang and vLLM allocate them for DSA models; None for other attention.
        heads: KV heads that tensor parallelism can divide; 1 for MLA, whose latent every rank holds.
    """

    kind: str
    bf16: int
    fp8: int
    plain_bf16: int
    plain_fp8: int
    engine_bf16: int | None
    engine_fp8: int | None
    heads: int

    def on_one_gpu(self, nbytes: int, tp: int) -> int:
        """The share of ``nbytes`` per token that each of ``tp`` GPUs holds.

        KV heads are divided, and repeated when there are fewer heads than GPUs; MLA's latent and the indexer keys
        are needed whole by every rank.
        """
        heads_per_gpu = -(-self.heads // tp)
        return nbytes * heads_per_gpu // self.heads


def kv_bytes_per_token(config: Mapping[str, Any] | TextShape) -> KvBytes:
    """KV cache bytes per token of a model, from its ``config.json``.

    Raises:
        SourceError: the config lacks a number this needs.
    """
    shape = config if isinstance(config, TextShape) else text_shape(config)
    if shape.mla is not None:
        return _mla(shape, shape.mla, shape.indexer)
    head_dim = shape.head_dim or 0
    channels = 2 * shape.layers * shape.kv_heads * head_dim
    return KvBytes(
        kind="gqa",
        bf16=2 * channels,
        fp8=2 * shape.layers * shape.kv_heads * (head_dim + SCALE_BYTES),
        plain_bf16=2 * channels,
        plain_fp8=channels,
        engine_bf16=None,
        engine_fp8=None,
        heads=shape.kv_heads,
    )


def _mla(shape: TextShape, mla: MlaShape, indexer: IndexerShape | None) -> KvBytes:
    channels = mla.kv_lora_rank + mla.rope
    latent = _scaled(mla.kv_lora_rank) + 2 * mla.rope
    keys = len(indexer.layers) if indexer else 0
    key_channels = indexer.head_dim if indexer else 0
    every = shape.layers * _scaled(key_channels) if indexer else 0
    return KvBytes(
        kind="mla+dsa" if indexer else "mla",
        bf16=shape.layers * 2 * channels + keys * 2 * key_channels,
        fp8=shape.layers * latent + keys * _scaled(key_channels),
        plain_bf16=shape.layers * 2 * channels,
        plain_fp8=shape.layers * channels,
        engine_bf16=shape.layers * 2 * channels + every if indexer else None,
        engine_fp8=shape.layers * latent + every if indexer else None,
        heads=1,
    )


def _scaled(channels: int) -> int:
    """Bytes of e4m3 channels with their float32 scales."""
    return channels + SCALE_BYTES * -(-channels // SCALE_CHANNELS)
