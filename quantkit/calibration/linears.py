"""The linears of a loaded layer outside its routed experts: in which order they are called, and with what.

Nothing is known of a layer's class. One batch is passed with hooks that note the calls; linears that were given
the same tensor (gate and up, q_a and kv_a) are one stage. To collect the inputs of a stage all batches are passed
again, each only up to the first call of that stage, where a hook ends the pass by an exception that carries the
input. So every thread has its own, nothing is stored between a hook and its caller, and one batch per task is in
memory whatever the number of samples. The price is attention, computed once for every stage behind it.

Several processes pass a batch each in turn; process 0 gets all inputs, and says what becomes of the weights.

Routed experts have not run meanwhile. Their output is NaN (``experts.Unknown``), so that a linear which depends on
it is found and refused: its inputs would need the experts, which are calibrated after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from quantkit.errors import UnsupportedError

from .experts import Unknown, run_at_stage
from .ranks import ALONE, Ranks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from .workers import Workers

R = TypeVar("R")
_HINT = "Keep it (decode.keep, or fewer decode.linears), or use --method mse."


class _Reached(Exception):
    """A pass reached the linear whose input is wanted."""

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        self.inputs = inputs


class Linears:
    """Linears of one layer, by their path in it ("self_attn.o_proj").

    Args:
        layer: transformers' module with its weights.
        where: name of the layer, for errors.
        run: passes one batch through the layer.
        batches: all of them, in the order of the samples.
        workers: threads for batches and for ``compute``.
        ranks: the processes that do this together.
        device: of the layer.

    Attributes:
        is_first: this is process 0, which gets the inputs.
        device: of the layer, and of the inputs.
    """

    def __init__(
        self, layer: Any, where: str, run: Callable[[slice], None], batches: Sequence[slice], workers: Workers,
        ranks: Ranks = ALONE, device: str = "cpu",
    ) -> None:  # fmt: skip
        self._layer, self._where, self._run = layer, where, run
        self._batches, self._workers, self._ranks = batches, workers, ranks
        self.is_first = ranks.is_first
        self.device = device

    def tell(self, value: R | None) -> R:
        """What process 0 says, everywhere."""
        told: R = self._ranks.tell(value)
        return told

    def stages(self, paths: Collection[str]) -> list[list[str]]:
        """The paths in the order in which their linears are called; those with the same input together.

        Raises:
            UnsupportedError: a linear is not called, or twice, or behind the routed experts.
        """
        stages: dict[tuple[Any, ...], list[str]] = {}
        calls = self.compute(lambda: self._record(paths))
        seen = [path for path, _ in calls]
        for path in paths:
            if seen.count(path) != 1:
                raise UnsupportedError(
                    f"transformers calls this linear {seen.count(path)} times", where=f"{self._where}.{path}",
                    accepted="for calibration, linears that are called once", hint=_HINT,
                )  # fmt: skip
        for path, inputs in calls:  # they are all alive, so a place in memory tells them apart
            key = (inputs.data_ptr(), inputs._version, inputs.shape, inputs.stride())
            stages.setdefault(key, []).append(path)
        return list(stages.values())

    def _record(self, paths: Collection[str]) -> list[tuple[str, Tensor]]:
        calls: list[tuple[str, Tensor]] = []
        experts = Unknown()

        def note(path: str, inputs: Tensor) -> None:
            if experts.reached and bool(inputs.isnan().any()):
                raise UnsupportedError(
                    "the input of this linear comes from the routed experts", where=f"{self._where}.{path}",
                    accepted="for calibration, linears before or beside them", hint=_HINT,
                )  # fmt: skip
            calls.append((path, inputs))

        with self._hooked(paths, note):
            run_at_stage(experts, lambda: self._run(self._batches[0]))
        return calls

    def inputs(self, path: str) -> Iterator[Tensor]:
        """Inputs of a linear, batch by batch ``[n, I]`` in the order of the samples, behind present weights.

        At process 0; the others pass their batches for it and get none.
        """
        owners = [self._ranks.owner(number) for number in range(len(self._batches))]

        import torch

        def stop(_: str, inputs: Tensor) -> None:
            raise _Reached(inputs)

        def one(part: slice) -> Tensor:
            try:
                run_at_stage(Unknown(), lambda: self._run(part))
            except _Reached as reached:
                return reached.inputs.reshape(-1, reached.inputs.shape[-1])
            raise RuntimeError(f"{self._where} did not call {path}")

        mine = [part for part, owner in zip(self._batches, owners, strict=True) if owner == self._ranks.rank]
        with self._hooked([path], stop), closing(self._workers.ordered(one, mine)) as passed:
            for owner in owners:
                found = next(passed) if owner == self._ranks.rank else None
                if owner:  # as an array: a tensor would travel with everything that it is a view of
                    array = self._ranks.deliver(None if found is None else found.contiguous().cpu().numpy(), owner)
                    found = None if array is None else torch.from_numpy(array).to(self.device)
                if self.is_first and found is not None:
                    yield found

    def weight(self, path: str) -> NDArray[np.float32]:
        """``[O, I]``, as it is now."""
        found: NDArray[np.float32] = self._layer.get_submodule(path).weight.detach().cpu().numpy()
        return found

    def replace(self, path: str, weight: NDArray[np.float32]) -> None:
        """Exchange a weight until the layer gives up its weights."""
        import torch

        found = torch.from_numpy(weight).to(self.device)
        self._layer.get_submodule(path).weight = torch.nn.Parameter(found, requires_grad=False)

    def compute(self, work: Callable[[], R]) -> R:
        """Run something with the one torch thread that every task has."""
        return next(self._workers.ordered(lambda _: work(), [None]))

    @contextmanager
    def _hooked(self, paths: Collection[str], seen: Callable[[str, Tensor], None]) -> Iterator[None]:
        def hook_of(path: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
            return lambda module, args, kwargs: seen(path, args[0] if args else kwargs["input"])

        hooks = [
            self._layer.get_submodule(path).register_forward_pre_hook(hook_of(path), with_kwargs=True)
            for path in paths
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
