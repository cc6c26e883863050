"""Routed experts without their fused module: transformers hands us the tokens, experts are streamed one by one.

transformers (5.x) looks up what runs a layer's experts in its ``ExpertsInterface``. The function registered here
passes hidden states, top-k indices and weights to the ``Stage`` that the layer's pass has set. A layer is passed
twice: once up to its experts, to collect the tokens of all samples (``Collect``), and, when all experts have been
run over all their tokens, once more with the finished output (``Replay``). So an expert's weights are read once
for all samples, whatever comes before and after it inside the layer is transformers' own code, and attention is
computed twice, which is little against calibrating experts.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

IMPLEMENTATION = "quantkit_streamed"
CHUNK_TOKENS = 4096  # tokens of one expert at a time; a multiple of hessian.MICRO_BATCH
PIECE_TOKENS = 256  # rows between two ``trim``; a page that is read brings its neighbours into memory
_current = threading.local()  # the stage of the pass that this thread runs


def _no_trim() -> None:
    pass


class Collected(Exception):
    """A pass reached its experts and has given their inputs."""


@dataclass(frozen=True, slots=True)
class Collect:
    """Copies the inputs of the experts to rows ``start`` and on, then stops the pass with ``Collected``."""

    inputs: Inputs
    start: int

    def __call__(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        rows = slice(self.start, self.start + hidden.shape[0])
        self.inputs.states[rows], self.inputs.index[rows] = hidden.cpu(), index.cpu()
        self.inputs.weight[rows] = weight.cpu()
        raise Collected


@dataclass(frozen=True, slots=True)
class Replay:
    """Returns the finished output of the experts, rows ``start`` and on."""

    outputs: Tensor
    start: int

    def __call__(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return self.outputs[self.start : self.start + hidden.shape[0]].to(hidden.device, copy=True)


@dataclass(slots=True)
class Unknown:
    """Returns NaN, for a pass that looks at something else than what comes of the experts.

    Attributes:
        reached: whether the experts were called.
    """

    reached: bool = False

    def __call__(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        self.reached = True
        return hidden.new_full(hidden.shape, math.nan)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the experts of a layer get: states ``[T, H]``, expert numbers and routing weights ``[T, k]``.

    All on the host; ``device`` is where experts compute.

    ``trim`` is called after every few rows that are read (``stream.Arrays.trim``): the states may be mapped, and
    those of all tokens must not come to lie in memory while one expert reads its own.
    """

    states: Tensor
    index: Tensor
    weight: Tensor
    device: str = "cpu"
    trim: Callable[[], None] = _no_trim

    def counts(self, experts: int) -> list[int]:
        """Tokens of each expert."""
        found: list[int] = self.index.flatten().bincount(minlength=experts).tolist()
        return found

    def routed(self, expert: int) -> Routed:
        """The tokens of one expert, in the order of the samples."""
        tokens, place = (self.index == expert).nonzero(as_tuple=True)
        return Routed(self.states, tokens, self.weight[tokens, place], self.device, self.trim)

    def all(self) -> Routed:
        """Every token, counting 1, as if all were routed to one expert."""
        import torch

        total = self.states.shape[0]
        tokens = torch.arange(total, device="cpu")
        return Routed(self.states, tokens, self.weight.new_ones(total), self.device, self.trim)


@dataclass(frozen=True, slots=True)
class Routed:
    """Tokens of one expert: rows ``tokens`` ``[n]`` of ``states`` ``[T, H]``, and their routing ``weight``.

    All on the host; ``device`` is where the expert computes.
    """

    states: Tensor
    tokens: Tensor
    weight: Tensor
    device: str = "cpu"
    trim: Callable[[], None] = _no_trim

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """States and routing weights of up to ``CHUNK_TOKENS`` tokens at a time, on the device."""
        for start in range(0, len(self.tokens), CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            tokens = self.tokens[part]
            states = self.states.new_empty(len(tokens), self.states.shape[1])
            for rows in pieces(len(tokens)):
                states[rows] = self.states[tokens[rows]]
                self.trim()
            yield states.to(self.device), self.weight[part].to(self.device)

    def outputs(self, expert: Callable[[Tensor], Tensor]) -> Tensor:
        """Outputs of an expert times the routing weights, ``[n, H]`` on the host."""
        found = self.states.new_empty(len(self.tokens), self.states.shape[1])
        start = 0
        for states, weight in self.chunks():
            found[start : start + len(states)] = expert(states).mul_(weight.unsqueeze(1))
            start += len(states)
        return found


def pieces(count: int) -> Iterator[slice]:
    """Rows that are read or written between two ``trim``."""
    return (slice(start, start + PIECE_TOKENS) for start in range(0, count, PIECE_TOKENS))


Stage = Collect | Replay | Unknown


def register() -> None:
    """Make transformers know ``IMPLEMENTATION``; may be called any number of times."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(IMPLEMENTATION, _run_stage)


def run_at_stage(stage: Stage | None, work: Callable[[], Any]) -> Any:
    """Run a layer's pass, whose experts meet ``stage``."""
    _current.stage = stage
    try:
        return work()
    finally:
        _current.stage = None


def _run_stage(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    stage: Stage = _current.stage
    return stage(hidden_states, top_k_index, top_k_weights)
