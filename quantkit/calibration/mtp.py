"""Multi-token-prediction layers, which transformers' models leave out: their configuration and their input.

Such a layer is a decoder layer like the others, behind an entry of its own (DeepSeek-V3 report, arXiv 2412.19437,
section 2.2)::

    h'_i = eh_proj [enorm(embedding of token i + k); hnorm(h_i)]          k-th prediction layer, k = 1, 2, ...

h is what the model gives after its final norm, and for a further prediction layer what the one before gives after
its ``shared_head.norm``. The embedding comes first in the product, as in the published checkpoints and in what
reads them: vLLM's ``deepseek_mtp.py``, SGLang's ``deepseek_nextn.py`` and transformers' ``MtpLayer``, which also
take h after the norm. vLLM alone puts zeros for the embedding at position 0; the report does not, nor do we. The
last k positions of a sample have no token that far ahead and are dropped, so samples get shorter.

The decoder layer is transformers' own class: the model is built with as many layers more, and what its
configuration says layer by layer is continued. A layer whose weights that class does not explain is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quantkit.errors import UnsupportedError
from quantkit.models.role import Role

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.checkpoint import Checkpoint
    from quantkit.models.classify import Classifier

_HINT = "Leave decode.mtp at keep, or use --method mse."
_ACCEPTED = "for calibration, layers as DeepSeek-V3 has them"
_PARTS = ("enorm", "hnorm", "eh_proj")


@dataclass(slots=True)
class PredictionLayer:
    """What a checkpoint holds of one multi-token-prediction layer.

    Attributes:
        number: of the layer.
        own: tensors that a decoder layer does not have, by their name in the layer ("enorm.weight").
        is_sparse: whether it has routed experts.
        has_indexer: whether it has an indexer of its own.
    """

    number: int
    own: dict[str, str] = field(default_factory=dict)
    is_sparse: bool = False
    has_indexer: bool = False


def prediction_layers(checkpoint: Checkpoint, classifier: Classifier, count: int) -> list[PredictionLayer]:
    """The first ``count`` of a checkpoint.

    Raises:
        UnsupportedError: one lacks a part of its entry.
    """
    first = classifier.num_layers or 0
    layers = [PredictionLayer(first + index) for index in range(count)]
    for name in checkpoint.tensors:
        role = classifier.role_of(name)
        if not role.is_mtp or role.layer is None or role.layer >= first + count:
            continue
        layer = layers[role.layer - first]
        layer.is_sparse |= role.role is Role.ROUTED_EXPERT
        layer.has_indexer |= role.role is Role.INDEXER
        if role.role is Role.MTP:
            layer.own[name.partition(f"layers.{role.layer}.")[2]] = name
    for index, layer in enumerate(layers):
        parts = (*_PARTS, "shared_head.norm") if index + 1 < count else _PARTS
        if missing := next((part for part in parts if f"{part}.weight" not in layer.own), None):
            raise UnsupportedError(
                f"a multi-token-prediction layer without {missing}", where=f"layer {layer.number}",
                accepted=_ACCEPTED, hint=_HINT,
            )  # fmt: skip
    return layers


def continued(config: Any, layers: Sequence[PredictionLayer]) -> dict[str, Any]:
    """Fields of a model's configuration that has these layers after its own.

    Raises:
        UnsupportedError: the configuration does not say what a further layer would be.
    """
    fields: dict[str, Any] = {"num_hidden_layers": config.num_hidden_layers + len(layers)}
    if types := getattr(config, "layer_types", None):
        if len(set(types)) > 1:
            raise UnsupportedError(
                "a multi-token-prediction layer of a model with several kinds of attention",
                where="config.json, layer_types", accepted="for calibration, one kind", hint=_HINT,
            )  # fmt: skip
        fields["layer_types"] = [*types, *(types[-1] for _ in layers)]
    if types := getattr(config, "mlp_layer_types", None):
        fields["mlp_layer_types"] = [*types, *("sparse" if layer.is_sparse else "dense" for layer in layers)]
    if types := getattr(config, "indexer_types", None):
        if shared := next((layer for layer in layers if not layer.has_indexer), None):
            raise UnsupportedError(
                "a multi-token-prediction layer that shares the indexer of another layer",
                where=f"layer {shared.number}", accepted="for calibration, an indexer of its own", hint=_HINT,
            )  # fmt: skip
        fields["indexer_types"] = [*types, *("full" for _ in layers)]
    return fields


def refuse_unexplained(
    layer: PredictionLayer, module: Any, names: Mapping[str, str], at: str, experts: Any
) -> None:
    """Refuse a layer that transformers' class does not fit.

    Args:
        module: transformers' layer, called ``at`` in the model.
        names: of what the checkpoint holds, by what the model calls it.
        experts: the module of its routed experts, None without any.

    Raises:
        UnsupportedError: naming what is missing.
    """
    streamed = {id(parameter) for parameter in experts.parameters()} if experts is not None else set()
    wanted = module.state_dict(keep_vars=True)
    lacking = [f"{at}.{key}" for key, value in wanted.items() if id(value) not in streamed]
    missing = next((key for key in lacking if key not in names), None)
    if missing or layer.is_sparse != (experts is not None):
        raise UnsupportedError(
            f"transformers' {type(module).__name__} does not fit this multi-token-prediction layer",
            where=missing or f"{at}.mlp", accepted=_ACCEPTED, hint=_HINT,
        )  # fmt: skip


def entry_names(layer: PredictionLayer, before: PredictionLayer | None, final_norm: str) -> dict[str, str]:
    """Names in the checkpoint of the weights of ``entry_module``.

    Args:
        before: the prediction layer before it.
        final_norm: name of the model's.
    """
    last = final_norm if before is None else before.own["shared_head.norm.weight"]
    return {"last.weight": last, **{f"{part}.weight": layer.own[f"{part}.weight"] for part in _PARTS}}


def entry_module(final_norm: Any, hidden_size: int) -> Any:
    """What leads into a prediction layer, on the meta device; all norms are of the kind of the final one."""
    import torch

    norms = {name: copy.deepcopy(final_norm) for name in ("last", "enorm", "hnorm")}
    product = torch.nn.Linear(2 * hidden_size, hidden_size, bias=False, device="meta")
    return torch.nn.ModuleDict({**norms, "eh_proj": product})


def enter(entry: Any, embedded: Tensor, hidden: Tensor) -> Tensor:
    """Input of a prediction layer, from later tokens' embeddings and what the layer before gave, ``[B, T, H]``."""
    import torch

    joined = torch.cat([entry["enorm"](embedded), entry["hnorm"](entry["last"](hidden))], -1)
    found: Tensor = entry["eh_proj"](joined)
    return found
