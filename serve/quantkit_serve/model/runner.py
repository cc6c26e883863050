"""``batch.Runner``: weights and page memory of one model, and one step at a time over them.

Legend: T tokens of the step, R sequences, N pages, S tokens in a page.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.artifact.canonical import canonical_json
from quantkit.errors import EnvironmentProblem, UsageError
from quantkit.units import format_bytes

from ..batch import Batch, ModelFacts
from ..config import EngineConfig
from ..phase import Phase
from .attention import StepContext
from .build import build_decoder, build_prediction
from .indexer import indexer_spec
from .kernel_ops import KernelOps
from .loader import Opened, open_weights
from .ops import Ops
from .pages import Pool, pools, whole_page_bytes
from .reference_ops import ReferenceOps
from .spec import model_spec
from .step import step_context
from .taped import TapedDecoder

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
        layers, self._prediction = [*self._decoder.layers], None
        if config.model.speculative == "mtp":
            self._prediction = build_prediction(self._spec, opened.weights, self._decoder)
            layers.append(self._prediction.layer)
        opened.weights.refuse_strangers()
        self._kinds = [layer.attention.kinds for layer in layers]
        self._layouts = [[self._ops.layout(kind) for kind in kinds] for kinds in self._kinds]
        self._hidden: Tensor | None = None  # of the latest step
        self._taped = None
        if isinstance(self._ops, KernelOps):
            indexer = indexer_spec(self._spec.text) if self._spec.shape.mla is not None else None
            self._taped = TapedDecoder(self._decoder, self._ops, None if indexer is None else indexer.top_k)
        self._pools: list[list[Pool]] | None = None
        self._memory: Tensor | None = None
        derived = sum(layer.attention.derived_bytes for layer in layers)
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
            EnvironmentProblem: the system has not so much.
        """
        if self._pools is not None:
            raise ValueError("the page pool is allocated already")
        if memory is None:
            memory = _zeros(num_pages, self.facts.page_bytes)
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
        pools = self._pools[: len(self._decoder.layers)]
        decoder = self._taped if self._taped is not None and batch.phase is Phase.DECODE else self._decoder
        hidden = decoder.forward(torch.from_numpy(batch.token_ids), self._step(batch), pools)
        self._hidden = None if self._prediction is None else hidden
        return self._decoder.logits(hidden[torch.from_numpy(batch.logit_rows)], batch.phase)

    @torch.inference_mode()
    def propose(self, batch: Batch, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> list[list[int]]:
        """See ``Proposer``: the most likely tokens by the multi-token-prediction layer.

        Raises:
            ValueError: there is no such layer, or no step before.
        """
        if self._prediction is None or self._hidden is None or self._pools is None:
            raise ValueError("a prediction layer and a step come before proposals")
        layer, pools = self._prediction, self._pools[-1]
        before = self._decoder.norm(self._hidden[torch.from_numpy(rows)])
        hidden = layer.forward(torch.from_numpy(batch.token_ids), before, self._step(batch), pools)
        hidden = hidden[torch.from_numpy(batch.logit_rows)]
        tokens = layer.logits(hidden).argmax(-1)
        found = [[token] for token in tokens.tolist()]
        going = np.arange(len(found))  # those that want more
        for applied in range(1, int(counts.max(initial=0))):
            is_going = counts[going] > applied
            going, kept = going[is_going], torch.from_numpy(is_going)
            step = self._step(_one_further(batch, going, applied))
            hidden = layer.forward(tokens[kept], hidden[kept], step, pools)
            tokens = layer.logits(hidden).argmax(-1)
            for row, token in zip(going.tolist(), tokens.tolist(), strict=True):
                found[row].append(token)
        return found

    def _step(self, batch: Batch) -> StepContext:
        return step_context(batch, self._config.cache.page_size, self._spec.vocab_size, self._spec.rope)

    def _kv_format_id(self) -> str:
        """Of everything that two parties must share to read each other's pages."""
        cache, spec = self._config.cache, self._spec
        kinds = [[[type(kind).__name__, asdict(kind)] for kind in own] for own in self._kinds]
        content: dict[str, object] = {
            "version": _LAYOUT_VERSION, "family": spec.family, "kinds": kinds, "page_size": cache.page_size,
            "kv_dtype": cache.kv_dtype, "rope": [spec.rope.frequencies.tolist(), spec.rope.factor],
        }  # fmt: skip
        if self._prediction is not None:
            content["prediction"] = "mtp"  # its pages are the last
        return hashlib.sha256(canonical_json(content)).hexdigest()


def _one_further(batch: Batch, rows: NDArray[np.int64], count: int) -> Batch:
    """The tokens ``count`` positions behind some of ``logit_rows``, each a run of its own; ``token_ids`` are not
    theirs."""
    ends = batch.logit_rows[rows]
    positions = batch.positions[ends] + count
    return Batch(
        phase=batch.phase,
        token_ids=batch.token_ids[ends],
        positions=positions,
        cu_tokens=np.arange(len(rows) + 1, dtype=np.int32),
        lengths=(positions + 1).astype(np.int32),
        block_table=batch.block_table[np.searchsorted(batch.cu_tokens, ends, side="right") - 1],
        logit_rows=np.arange(len(rows)),
    )


def open_runner(source: str | PathLike[str], config: EngineConfig, name: str | None = None) -> ModelRunner:
    """The model of an artifact or checkpoint, loaded; its page pool is yet to be allocated.

    Args:
        name: what /v1/models says; by default the last part of the path.

    Raises:
        ArtifactError, SourceError, UnsupportedError, UsageError: see ``loader`` and ``ModelRunner``.
    """
    opened = open_weights(source, config.model.weights)
    return ModelRunner(opened, config, name or Path(source).name)


def _zeros(num_pages: int, page_bytes: int) -> Tensor:
    try:
        return torch.zeros((num_pages, page_bytes), dtype=torch.uint8)
    except RuntimeError:  # torch's of an allocation that failed
        size = format_bytes(num_pages * page_bytes)
        raise EnvironmentProblem(
            f"there is no memory for KV pages of {size}", hint="A smaller --kv-memory may do."
        ) from None


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
