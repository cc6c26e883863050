"""Bits of the kernels' attention over contexts so long that decoding splits them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit_serve.model.attention import StepContext
from quantkit_serve.model.kernel_ops import KernelOps
from quantkit_serve.model.pages import GqaPages, MlaPages, PageKind, Pool
from quantkit_serve.model.rope import Angles
from quantkit_serve.phase import Phase
from tests.serve.model.latent import PAGE, kernel_ops

TOKENS = 1100  # decoding splits a context of 1024 and more
HEADS = 2
KINDS: dict[str, PageKind] = {"gqa": GqaPages(1, 32), "mla": MlaPages(512, 64, True)}


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


class Layer:
    """A pool of one kind, and what a request of TOKENS tokens brings."""

    def __init__(self, name: str, ops: KernelOps) -> None:
        layout = ops.layout(KINDS[name])
        pages = torch.zeros((TOKENS // PAGE + 1, layout.page_bytes), dtype=torch.uint8)
        self._pool, self._attend = Pool(pages, layout), getattr(ops, name)
        latent = (values(TOKENS, HEADS, 512), values(TOKENS, HEADS, 64), values(TOKENS, 512), values(TOKENS, 64))
        grouped = (values(TOKENS, HEADS, 32), values(TOKENS, 1, 32), values(TOKENS, 1, 32))
        self._given: Sequence[Tensor] = latent if name == "mla" else grouped

    def run(self, first: int, last: int, phase: Phase, **further: Any) -> Tensor:
        own = [tensor[first:last] for tensor in self._given]
        out: Tensor = self._attend(*own, self._pool, _step(first, last, phase), 0.1, **further)
        return out


def _step(first: int, last: int, phase: Phase) -> StepContext:
    positions, count = torch.arange(first, last), last - first
    return StepContext(
        phase=phase,
        positions=positions,
        cu_tokens=torch.tensor([0, count], dtype=torch.int32),
        lengths=torch.tensor([last], dtype=torch.int32),
        block_table=torch.arange(TOKENS // PAGE + 1, dtype=torch.int32)[None],
        slots=positions,
        rows=torch.zeros(count, dtype=torch.int32),
        visible=(positions + 1).int(),
        is_single=count == 1,
        angles=Angles(torch.ones(count, 1), torch.zeros(count, 1)),
        longest=last,
    )


@pytest.mark.parametrize("name", KINDS)
def test_a_last_chunk_of_one_token_has_the_bits_of_the_whole_prompt(name: str) -> None:
    layer = Layer(name, kernel_ops())
    whole = layer.run(0, TOKENS, Phase.PREFILL)
    assert torch.equal(layer.run(TOKENS - 1, TOKENS, Phase.PREFILL), whole[-1:])
    assert not torch.equal(layer.run(TOKENS - 1, TOKENS, Phase.DECODE), whole[-1:])  # which the test is about


@pytest.mark.parametrize("name", KINDS)
def test_several_tokens_of_a_decode_step_have_the_bits_that_they_have_one_by_one(name: str) -> None:
    layer = Layer(name, kernel_ops())
    layer.run(0, TOKENS - 4, Phase.PREFILL)
    single = torch.cat([layer.run(t, t + 1, Phase.DECODE) for t in range(TOKENS - 4, TOKENS)])
    assert torch.equal(layer.run(TOKENS - 4, TOKENS, Phase.DECODE), single)
