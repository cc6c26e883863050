"""``batch.Runner``: weights and page memory of one model, and one step at a time over them.

Legend: T tokens of the step, R sequences, N pages, S tokens in a page.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from quantkit.artifact.canonical import canonical_json
from quantkit.errors import UsageError

from ..batch import Batch, ModelFacts
from ..config import EngineConfig
from .build import build_decoder
from .kernel_ops import KernelOps
from .loader import Opened, open_weights
from .ops import Ops
from .pages import Pool, pools, whole_page_bytes
from .reference_ops import ReferenceOps
from .spec import model_spec
from .step import step_context

_SCRIBBLE = 0x35  # bytes that are finite numbers in every layout
_LAYOUT_VERSION = 1  # of pages.py and of the layouts of quantkit_kernels.forward.pages


class ModelRunner:
    """See ``Runner``.

    Attributes:
        facts: of the model.
    """

    def __init__(self, opened: Opened, config: EngineConfig, name: str) -> None:
        """
        Raises:
            SourceError, UnsupportedError: the checkpoint.
            UsageError: settings that exclude each other.
        """
        self._config = config
        self._ops = _ops(config)
        self._spec = model_spec(opened.config, opened.classifier.family.name)
        self._decoder = build_decoder(self._spec, opened.weights, self._ops)
        self._layouts = [[self._ops.layout(k) for k in layer.attention.kinds] for layer in self._decoder.layers]
        self._pools: list[list[Pool]] | None = None
        self._memory: Tensor | None = None
        derived = sum(layer.attention.derived_bytes for layer in self._decoder.layers)
        self.facts = ModelFacts(
            name=name,
            vocab_size=self._spec.vocab_size,
            max_model_len=self._spec.max_model_len,
            page_bytes=whole_page_bytes(self._layouts),
            kv_format_id=self._kv_format_id(),
            eos_token_ids=opened.eos_token_ids,
            memory=opened.weights.memory() | {"derived": derived},
        )

    def allocate(self, num_pages: int, memory: Tensor | None = None) -> None:
        """Take the memory of the page pool, once, before the first step.

        Args:
            memory: uint8 ``[num_pages, page_bytes]`` to use, which other processes may share.

        Raises:
            ValueError: called twice, or memory that does not fit.
        """
        if self._pools is not None:
            raise ValueError("the page pool is allocated already")
        if memory is None:
            memory = torch.zeros((num_pages, self.facts.page_bytes), dtype=torch.uint8)
        if len(memory) != num_pages:
            raise ValueError(f"memory holds {len(memory)} pages, not {num_pages}")
        self._memory, self._pools = memory, pools(self._layouts, memory)

    def scribble(self, page: int) -> None:
        """Overwrite a page in every layer, as a fault that is injected in tests does."""
        if self._memory is not None:
            self._memory[page] = _SCRIBBLE

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Store the run's keys and values in its pages; float32 logits ``[n, vocab]`` of ``logit_rows``.

        Raises:
            ValueError: before ``allocate``, or a batch that does not fit together or points outside of the pool;
                no page is written then.
        """
        if self._pools is None:
            raise ValueError("allocate comes before the first step")
        step = step_context(batch, self._config.cache.page_size, self._spec.vocab_size, self._spec.rope)
        return self._decoder.forward(
            torch.from_numpy(batch.token_ids), step, self._pools, torch.from_numpy(batch.logit_rows)
        )

    def _kv_format_id(self) -> str:
        """Of everything that two parties must share to read each other's pages."""
        cache, spec = self._config.cache, self._spec
        kinds = [
            [[type(kind).__name__, asdict(kind)] for kind in layer.attention.kinds]
            for layer in self._decoder.layers
        ]
        content = {
            "version": _LAYOUT_VERSION, "family": spec.family, "kinds": kinds, "page_size": cache.page_size,
            "kv_dtype": cache.kv_dtype, "rope": [spec.rope.frequencies.tolist(), spec.rope.factor],
        }  # fmt: skip
        return hashlib.sha256(canonical_json(content)).hexdigest()


def open_runner(source: str | PathLike[str], config: EngineConfig, name: str | None = None) -> ModelRunner:
    """The model of an artifact or checkpoint, loaded; its page pool is yet to be allocated.

    Args:
        name: what /v1/models says; by default the last part of the path.

    Raises:
        ArtifactError, SourceError, UnsupportedError, UsageError: see ``loader`` and ``ModelRunner``.
    """
    opened = open_weights(source, config.model.weights)
    return ModelRunner(opened, config, name or Path(source).name)


def _ops(config: EngineConfig) -> Ops:
    model, cache = config.model, config.cache
    if model.compute == "bfloat16":
        if cache.kv_dtype == "f32":
            raise UsageError("pages of f32 need float32 compute", where="kv_dtype", accepted="fp8, bf16")
        return KernelOps(model, cache)
    if cache.kv_dtype == "fp8":
        raise UsageError("float32 compute does not round to FP8 pages", where="kv_dtype", accepted="f32, bf16")
    if model.fp8_activations != "none":
        raise UsageError("float32 compute rounds no activations", where="fp8_activations", accepted="none")
    return ReferenceOps(model, cache)
