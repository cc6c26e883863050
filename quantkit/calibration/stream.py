"""Hidden states of all samples carried through a model layer by layer, one expert in memory at a time.

Results do not depend on the number of threads: a task is one batch of ``BATCH_TOKENS`` tokens or one expert, every
task computes with one torch thread, and experts' outputs are added in the order of the experts. Nor do they depend
on the number of processes (``ranks.py``): each passes its batches and runs its experts, everybody gets the inputs
of all experts, and each gets of every expert the outputs for its own tokens, which it adds in the same order.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from quantkit.errors import UsageError

from .arrays import Arrays, InMemory
from .aside import Aside
from .experts import Collect, Collected, Inputs, Replay, Routed, pieces, run_at_stage
from .linears import Linears
from .memory import give_back_freed
from .ranks import ALONE, Ranks
from .skeleton import CARRIED, Skeleton
from .workers import Workers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

BATCH_TOKENS = 2048
AHEAD = 2  # tasks of a thread that may be done before others' results come


class LayerWork(Protocol):
    """What is done with a layer while the samples pass it."""

    def linears(self, linears: Linears) -> None:
        """Called first, with the layer just loaded: may exchange weights of linears outside the experts."""

    def expert(self, expert: int, routed: Routed, inputs: Inputs) -> Tensor:
        """Run an expert over its tokens; ``inputs`` are all tokens of the layer. Called by any thread.

        Returns:
            Outputs times routing weights ``[n, H]``.
        """

    def settled(self) -> bool:
        """Called when all experts were run: whether what was done stands. At process 0, whose word it is."""

    def give_up(self) -> None:
        """What was done does not stand: from now on the layer computes with its own weights."""

    def done(self) -> Collection[int]:
        """At process 0: experts that it has results of; it runs them."""

    def found(self, expert: int) -> Any:
        """At other processes: what process 0 must know of an expert that was run here; picklable."""

    def take(self, expert: int, found: Any) -> None:
        """At process 0: what another one found. In another thread, and done before ``settled``."""


class Stream:
    """Samples on their way through a model.

    Attributes:
        hidden: float32 ``[N, T, H]``, inputs of layer ``position``; T is one less behind each prediction layer.
            One of several processes has those of its own batches, process 0 has all after ``gather``.
        carried: int64 ``[N, T, k]``, top-k of the last layer with an indexer; None where there is none.
        position: the next layer.
    """

    def __init__(
        self, skeleton: Skeleton, samples: NDArray[np.int64], workers: Workers, arrays: Arrays | None = None,
        ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        """
        Args:
            samples: token ids ``[N, T]``.
            arrays: default: in memory.
            ranks: the processes that do this together; each has such a stream and calls the same methods.

        Raises:
            UsageError: samples too short for the prediction layers.
        """
        predictions = skeleton.num_layers - skeleton.num_main
        if samples.shape[1] <= predictions:
            raise UsageError(
                f"samples of {samples.shape[1]} tokens", where="calibration.length",
                accepted=f"{predictions + 1} or more, for {predictions} multi-token-prediction layers",
            )  # fmt: skip
        self.skeleton, self._samples, self._workers, self._ranks = skeleton, samples, workers, ranks
        self._arrays = arrays or InMemory()
        self._step = batch_samples(samples.shape[1])
        self._kept: dict[str, Tensor] = {}
        self.hidden = self._states(0)
        self.carried: Tensor | None = None
        self.position = 0

    def stand_at(self, position: int) -> None:
        """Make room for the inputs of a layer as the one before left them; what stands there is undefined."""
        self.position, self.carried = position, None
        self.hidden = self._states(max(0, position - self.skeleton.num_main))

    def _states(self, predictions: int) -> Tensor:
        """Hidden states behind so many prediction layers, always in the same memory."""
        count, length = self._samples.shape
        return self._array("hidden", (count, length - predictions, self.skeleton.hidden_size), "float32")

    def embed(self) -> None:
        """Start: the embedding of the tokens."""
        import numpy as np

        self.stand_at(0)
        with self.skeleton.embedding(np.unique(self._samples)) as embedded:
            for part in self._batches():
                self.hidden[part] = embedded(self._samples[part]).cpu()
                self.trim()

    def gather(self) -> None:
        """Give process 0 the state of all samples."""
        for number, part in enumerate(self._all_batches()):
            for array in (self.hidden, self.carried):
                if array is not None:
                    self._ranks.to_first(array[part], self._ranks.owner(number))
            self.trim()

    def spread(self) -> None:
        """Give every process what process 0 has: the position, and behind the first layer the state."""
        shape = None if self.carried is None else tuple(self.carried.shape)
        position, shape = self._ranks.tell((self.position, shape))
        if not self._ranks.is_first:
            self.stand_at(position)
            if shape is not None:
                self.start_carrying(shape)
        for number, part in enumerate(self._all_batches() if position else ()):
            for array in (self.hidden, self.carried):
                if array is not None:
                    self._ranks.from_first(array[part], self._ranks.owner(number))
            self.trim()

    def forward(self, work: LayerWork) -> None:
        """Pass layer ``position``; all of it once more, with its own weights, if the work on it does not stand."""
        if self.position >= self.skeleton.num_main:
            self._enter()
        while not self._forward(work):
            work.give_up()
        give_back_freed()
        self.position += 1

    def _enter(self) -> None:
        """From what the layer before gave to the input of a prediction layer.

        New states overwrite old ones of the same memory. Samples get shorter, so none is written to before it was
        read.
        """
        import numpy as np

        ahead = self.position - self.skeleton.num_main + 1
        before, after, tokens = self.hidden, self._states(ahead), self._samples[:, ahead:]
        layer, used = self.position, np.unique(tokens)
        with self.skeleton.embedding(used, layer) as embedded, self.skeleton.entry(layer) as enter:
            pairs = ((embedded(tokens[part]), self._there(before[part, :-1])) for part in self._batches())
            results = self._workers.ordered(lambda pair: enter(*pair).cpu(), pairs)
            for part, result in zip(self._batches(), results, strict=True):
                after[part] = result
                self.trim()
        self.hidden, self.carried = after, None

    def _forward(self, work: LayerWork) -> bool:
        """False, with nothing of the state changed: the work does not stand."""
        layer = self.position
        with self.skeleton.loaded(layer) as module:
            where, look = self.skeleton.name_of(layer), partial(self._look, module)
            batches, device = self._all_batches(), self.skeleton.device
            work.linears(Linears(module, where, look, batches, self._workers, self._ranks, device))
            outputs = None
            if self.skeleton.num_experts[layer]:
                outputs = self._run_experts(self._collect(module), work)
                if not self._ranks.tell(work.settled() if self._ranks.is_first else None):
                    return False
            results = self._workers.ordered(lambda part: self._pass(module, part, outputs), self._batches())
            for part, result in zip(self._batches(), results, strict=True):
                if self.skeleton.carries(layer):
                    result, carried = result
                    self._carry(part, carried)
                self.hidden[part] = result
                self.trim()
        return True

    def _run_experts(self, inputs: Inputs, work: LayerWork) -> Tensor:
        """Outputs of the experts for the tokens of this process, at their rows of ``[N * T, H]``."""
        outputs = self._array("outputs", tuple(inputs.states.shape), "float32")
        for start in range(0, len(outputs), BATCH_TOKENS):
            outputs[start : start + BATCH_TOKENS] = 0
            self.trim()
        ranks, experts = self._ranks, range(self.skeleton.num_experts[self.position])
        done = ranks.tell(work.done() if ranks.is_first and ranks.size > 1 else ())
        owners = ranks.owners(inputs.counts(len(experts)), done)

        def one(expert: int) -> tuple[Tensor, Tensor]:
            routed = inputs.routed(expert)
            return routed.tokens, work.expert(expert, routed, inputs)

        mine = [expert for expert in experts if owners[expert] == ranks.rank]
        ahead = AHEAD if ranks.size > 1 else 1
        with closing(self._workers.ordered(one, mine, ahead)) as results, Aside() as aside:
            for expert, owner in zip(experts, owners, strict=True):
                is_mine = owner == ranks.rank
                tokens, found = next(results) if is_mine else (inputs.routed(expert).tokens, None)
                places = tokens // (self._step * self.hidden.shape[1]) % ranks.size
                tokens, found = ranks.share(found, tokens, places, owner, inputs.states)
                for rows in pieces(len(tokens)):
                    outputs[tokens[rows]] += found[rows]
                    self.trim()
                del found  # not beside those of the next one
                if owner:
                    told = ranks.deliver(work.found(expert) if is_mine else None, owner)
                    if ranks.is_first:
                        aside.do(work.take, expert, told)
                self.trim()
        give_back_freed()
        return outputs

    def _collect(self, module: Any) -> Inputs:
        num_tokens = self.hidden.shape[0] * self.hidden.shape[1]
        top_k = self.skeleton.top_k
        inputs = Inputs(
            states=self._array("states", (num_tokens, self.skeleton.hidden_size), "float32"),
            index=self._array("index", (num_tokens, top_k), "int64"),
            weight=self._array("weight", (num_tokens, top_k), "float32"),
            device=self.skeleton.device,
            trim=self.trim,
        )

        def one(part: slice) -> None:
            stage = Collect(inputs, part.start * self.hidden.shape[1])
            try:
                run_at_stage(stage, lambda: self._call(module, part))
            except Collected:
                return
            raise RuntimeError(f"layer {self.position} did not call its experts")

        for _ in self._workers.ordered(one, self._batches()):
            self.trim()
        for number, part in enumerate(self._all_batches()):
            rows = slice(part.start * self.hidden.shape[1], part.stop * self.hidden.shape[1])
            for array in (inputs.states, inputs.index, inputs.weight):
                self._ranks.everywhere(array[rows], self._ranks.owner(number))
            self.trim()
        return inputs

    def _pass(self, module: Any, part: slice, outputs: Tensor | None) -> Any:
        stage = None if outputs is None else Replay(outputs, part.start * self.hidden.shape[1])
        result = run_at_stage(stage, lambda: self._call(module, part))
        if not self.skeleton.carries(self.position):
            return result.cpu()
        states, carried = result
        return states.cpu(), None if carried is None else carried.cpu()

    def _look(self, module: Any, part: slice) -> None:
        try:
            self._call(module, part)
        finally:
            self.trim()

    def _call(self, module: Any, part: slice) -> Any:
        hidden = self._there(self.hidden[part])
        call = self.skeleton.calls(hidden.shape[0], hidden.shape[1])[self.position]
        extra: dict[str, Any] = {}
        if self.skeleton.carries(self.position):
            extra[CARRIED] = None if self.carried is None else self._there(self.carried[part])
        return module(hidden, *call.args, **call.kwargs, **extra)

    def _there(self, tensor: Tensor) -> Tensor:
        """Where layers compute; the stream's own arrays are on the host."""
        return tensor.to(self.skeleton.device)

    def _carry(self, part: slice, carried: Tensor | None) -> None:
        if carried is None:
            return
        if self.carried is None:
            self.carried = self.start_carrying((self._samples.shape[0], *carried.shape[1:]))
        self.carried[part] = carried

    def start_carrying(self, shape: tuple[int, ...]) -> Tensor:
        """Make room for the top-k ``[N, T, k]``, which keeps its shape from layer to layer."""
        self.carried = self._array("carried", shape, "int64")
        return self.carried

    def trim(self) -> None:
        """For whoever goes through the stream's arrays in pieces."""
        self._arrays.trim()

    def _batches(self) -> list[slice]:
        """The batches of this process."""
        numbered = enumerate(self._all_batches())
        return [part for number, part in numbered if self._ranks.owner(number) == self._ranks.rank]

    def _all_batches(self) -> list[slice]:
        """Which samples are a batch, whatever the number of processes."""
        total = len(self._samples)
        return [slice(start, min(start + self._step, total)) for start in range(0, total, self._step)]

    def _array(self, name: str, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """A large array; in the same memory for every layer, although prediction layers need less of it."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < prod(shape):
            kept = self._kept[name] = self._arrays(shape, dtype)
        return kept.view(-1)[: prod(shape)].view(shape)


def batch_samples(length: int) -> int:
    """Samples of one batch."""
    return max(1, BATCH_TOKENS // length)
