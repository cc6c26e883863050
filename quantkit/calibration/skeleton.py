"""transformers' own model without its weights, and one layer of it with them.

The whole model is built on the meta device, which costs nothing, so that masks, rotary embeddings and what else a
model hands to its layers are computed by the model itself: its forward pass runs once per batch shape with every
layer replaced by a recorder. A layer gets its weights right before it is used and gives them up after.

Names are translated by transformers' conversion mapping of the model type. Everything is float32: the product of
an FP8 code and its scale is no bfloat16 number, calibration should see the weights and not the rounding of one
kind of arithmetic, and matrix products of most CPUs are no slower in it. It costs twice the memory of bfloat16 for
one layer without its experts.

Multi-token-prediction layers, if wanted, are further decoder layers of the model (``mtp.py``).

Left out: models with code of their own (nothing of a checkpoint is executed).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from quantkit.errors import SourceError, UnsupportedError
from quantkit.models.classify import Classifier
from quantkit.models.role import Role

from .experts import register
from .model import experts_of, model_on_meta
from .mtp import PredictionLayer, enter, entry_module, entry_names, prediction_layers, refuse_unexplained
from .weights import WeightReader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from quantkit.checkpoint import Checkpoint
    from quantkit.checkpoint.tensor import StoredWeight

_ENTRY = "entry"  # below the name of a prediction layer
CARRIED = "prev_topk_indices"  # what a DSA layer without an indexer takes over from the layer before


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What the model hands to a layer besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Skeleton:
    """A model of transformers, all weights on the meta device.

    Attributes:
        num_layers: decoder layers, with multi-token-prediction ones that are wanted.
        num_main: the model's own among them, which come first.
        hidden_size: width of the hidden states.
        top_k: experts of a token.
        num_experts: routed experts of each layer, 0 for a dense one.
        device: of weights while they are there, and of what a layer is called with.
    """

    def __init__(
        self, checkpoint: Checkpoint, classifier: Classifier, read: WeightReader, predictions: int = 0,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        """
        Args:
            read: rows of a stored weight as float32.
            predictions: how many of the checkpoint's multi-token-prediction layers are wanted.
            device: where layers compute.

        Raises:
            UnsupportedError: transformers has no such model, or not with experts that can be streamed.
            EnvironmentProblem: transformers is not installed.
        """
        import torch

        self._checkpoint, self._read, self.device = checkpoint, read, device
        self._weights = {weight.weight.name: weight for weight in checkpoint.weights().values()}
        register()
        further = prediction_layers(checkpoint, classifier, predictions)
        self._model = model_on_meta(checkpoint, further)
        self._decoder: Any = self._model.get_decoder()
        self._layers: list[Any] = list(self._decoder.layers)
        self._prefix = next(name for name, m in self._model.named_modules() if m is self._decoder)
        self._carries = [CARRIED in inspect.signature(type(layer).forward).parameters for layer in self._layers]
        self.num_layers = len(self._layers)
        self.num_main = self.num_layers - predictions
        self.hidden_size = int(self._decoder.config.hidden_size)
        self._experts = [experts_of(layer, number) for number, layer in enumerate(self._layers)]
        self.top_k = int(self._decoder.config.num_experts_per_tok)
        self.num_experts = [int(e.num_experts) if e is not None else 0 for e in self._experts]
        self._names = self._translated(classifier)
        self._entries = {layer.number: self._entry(index, further) for index, layer in enumerate(further)}
        self._decoder.norm = torch.nn.Identity()
        del self._decoder.layers
        with torch.device(device):
            for name, module in self._decoder.named_children():
                if "rotary" in name:  # its frequencies come from the configuration, not from the checkpoint
                    setattr(self._decoder, name, type(module)(self._decoder.config))
        self._calls: dict[tuple[int, int], list[LayerCall]] = {}
        self._lock = threading.Lock()

    def _entry(self, index: int, further: Sequence[PredictionLayer]) -> Any:
        """Of a prediction layer that fits; its weights' names are known from then on."""
        layer, before = further[index], further[index - 1] if index else None
        at = self.name_of(layer.number)
        refuse_unexplained(layer, self._layers[layer.number], self._names, at, self._experts[layer.number])
        names = entry_names(layer, before, self._name(f"{self._prefix}.norm.weight"))
        self._names |= {f"{at}.{_ENTRY}.{key}": name for key, name in names.items()}
        if (embedding := layer.own.get("embed_tokens.weight")) is not None:
            self._names[f"{at}.{_ENTRY}.embed_tokens.weight"] = embedding
        return entry_module(self._decoder.norm, self.hidden_size)

    @contextmanager
    def entry(self, layer: int) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
        """From later tokens' embeddings and the states before a prediction layer to its input (``mtp.enter``)."""
        with self._filled(self._entries[layer], f"{self.name_of(layer)}.{_ENTRY}.", frozenset()):
            yield partial(enter, self._entries[layer])

    @contextmanager
    def embedding(
        self, used: NDArray[np.int64], layer: int = 0
    ) -> Iterator[Callable[[NDArray[np.int64]], Tensor]]:
        """From token ids ``[B, T]`` to what the first layer gets ``[B, T, H]``.

        Args:
            layer: the one that the embeddings are for; a prediction layer may have a table of its own.
            used: all ids that will come, sorted, each once. Only their rows are read: a whole table in float32 can
                be larger than any layer.
        """
        import numpy as np
        import torch

        module = self._decoder.get_input_embeddings()
        name = next(name for name, m in self._model.named_modules() if m is module)
        own = self._names.get(f"{self.name_of(layer)}.{_ENTRY}.embed_tokens.weight")
        weight = self._weights[own or self._name(f"{name}.weight")]
        rows = np.concatenate([self._read(weight, int(i), int(i) + 1) for i in used])
        before, padding = module.weight, module.padding_idx
        table = torch.from_numpy(rows).to(self.device)
        module.weight, module.padding_idx = torch.nn.Parameter(table, requires_grad=False), None
        try:
            yield (
                lambda ids: (
                    self._record(input_ids=torch.from_numpy(np.searchsorted(used, ids)).to(self.device))[0].hidden
                )
            )
        finally:
            module.weight, module.padding_idx = before, padding

    def calls(self, batch: int, length: int) -> list[LayerCall]:
        """For each layer what it gets besides hidden states ``[batch, length, H]``."""
        import torch

        with self._lock:  # the model's list of layers is exchanged meanwhile
            if (batch, length) not in self._calls:
                shape = (batch, length, self.hidden_size)
                recorders = self._record(inputs_embeds=torch.zeros(shape, device=self.device))
                self._calls[batch, length] = [recorder.call for recorder in recorders]
            return self._calls[batch, length]

    def _record(self, **inputs: Tensor) -> list[_Recorder]:
        import torch

        recorders = [_Recorder(layer, c) for layer, c in zip(self._layers, self._carries, strict=True)]
        self._decoder.layers = recorders
        try:
            with torch.no_grad():
                self._decoder(**inputs, use_cache=False)
        finally:
            del self._decoder.layers
        return recorders

    def carries(self, layer: int) -> bool:
        """Whether the layer takes the top-k of the layer before and returns its own."""
        return self._carries[layer]

    def experts(self, layer: int) -> Any:
        """The module of the routed experts, without weights; None for a dense layer."""
        return self._experts[layer]

    def name_of(self, layer: int) -> str:
        """What the model calls the layer."""
        return f"{self._prefix}.layers.{layer}"

    def linear(self, layer: int, weight: StoredWeight) -> str:
        """Path in the layer of the linear that a stored weight belongs to.

        Raises:
            UnsupportedError: transformers has no such linear.
        """
        import torch

        stored = weight.weight.name
        start = f"{self.name_of(layer)}."
        key = next((key for key, name in self._names.items() if name == stored and key.startswith(start)), "")
        path = key.removeprefix(start).removesuffix(".weight")
        module = dict(self._layers[layer].named_modules()).get(path)
        if not isinstance(module, torch.nn.Linear):
            raise UnsupportedError(
                "transformers has no linear of its own for this weight", where=weight.weight.place,
                accepted="for calibration, linears of decoder layers",
                hint="Keep it (decode.keep, or fewer decode.linears), or use --method mse.",
            )  # fmt: skip
        return path

    @contextmanager
    def loaded(self, number: int) -> Iterator[Any]:
        """The layer with its weights, all but those of the routed experts.

        Raises:
            SourceError: a weight is missing or of another shape than the model wants.
        """
        layer, experts = self._layers[number], self._experts[number]
        skipped = frozenset(id(p) for p in experts.parameters()) if experts is not None else frozenset()
        with self._filled(layer, f"{self.name_of(number)}.", skipped):
            yield layer

    @contextmanager
    def _filled(self, root: Any, at: str, skipped: frozenset[int]) -> Iterator[None]:
        """``root``, called ``at`` in the model, has its weights, all but those with the identities ``skipped``."""
        import torch

        before: list[tuple[Any, str, Any]] = []
        try:
            for path, old in [*root.named_parameters(), *root.named_buffers()]:
                if id(old) in skipped or old.device.type != "meta":
                    continue
                owner, _, name = path.rpartition(".")
                module = root.get_submodule(owner)
                tensor = self._tensor(at + path, tuple(old.shape))
                is_parameter = isinstance(old, torch.nn.Parameter)
                before.append((module, name, old))
                setattr(module, name, torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
            yield
        finally:
            for module, name, old in before:
                setattr(module, name, old)

    def _tensor(self, key: str, shape: tuple[int, ...]) -> Tensor:
        import torch

        name = self._name(key)
        weight = self._weights.get(name)
        array = self._read(weight, 0, weight.shape[0]) if weight is not None else self._plain(name)
        if array.shape != shape:
            raise SourceError(f"shape {list(array.shape)}", where=name, accepted=f"{list(shape)}, by config.json")
        return torch.from_numpy(array).to(self.device)

    def _name(self, key: str) -> str:
        """In the checkpoint, of what the model calls ``key``."""
        if key not in self._names:
            raise SourceError(
                "the model needs a weight that the checkpoint lacks", where=key,
                hint="Calibration runs the model; mse and rtn need the experts only.",
            )  # fmt: skip
        return self._names[key]

    def _plain(self, name: str) -> NDArray[np.float32]:
        import numpy as np

        import quantkit_kernels as kernels

        info = self._checkpoint.tensors[name]
        if info.dtype not in ("BF16", "F16", "F32"):
            raise UnsupportedError(f"dtype {info.dtype}", where=info.place, accepted="BF16, F16 or F32")
        array = self._checkpoint.array(info)
        if info.dtype == "BF16":
            return kernels.bf16_to_float32(array.reshape(1, -1)).reshape(info.shape)
        return np.array(array, dtype=np.float32)

    def _translated(self, classifier: Classifier) -> dict[str, str]:
        """Name in the model -> name in the checkpoint, of everything but routed experts."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key

        renamings = [t for t in get_model_conversion_mapping(self._model) if isinstance(t, WeightRenaming)]
        wanted = self._model.state_dict()
        consumed = {part.name for weight in self._weights.values() for part in weight.parts[1:]}
        names: dict[str, str] = {}
        for name in self._checkpoint.tensors:
            role = classifier.role_of(name)
            if role.role is Role.ROUTED_EXPERT or name in consumed:
                continue
            if role.is_mtp and (role.role is Role.MTP or (role.layer or 0) >= self.num_layers):
                continue
            stored = f"{self._weights[name].module}.weight" if name in self._weights else name
            stored = stored.removeprefix(classifier.family.prefix)  # what stands around a language model
            key, _ = rename_source_key(stored, renamings, [], self._model.base_model_prefix, wanted)
            names[key] = name
        return names


class _Recorder:
    """Stands for a layer: notes what it is called with and returns what it is given."""

    def __init__(self, layer: Any, carries: bool) -> None:
        self._layer, self._carries = layer, carries
        self.hidden: Tensor
        self.call: LayerCall

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.hidden = hidden_states
        self.call = LayerCall(args, {k: v for k, v in kwargs.items() if k != CARRIED})
        return (hidden_states, None) if self._carries else hidden_states

    def __getattr__(self, name: str) -> Any:  # models look at attributes of their layers (attention_type)
        return getattr(self._layer, name)
