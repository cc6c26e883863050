"""transformers' model of a checkpoint without its weights, and where its experts are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quantkit.errors import EnvironmentProblem, UnsupportedError
from quantkit.models.config import text_config

from .experts import IMPLEMENTATION
from .mtp import PredictionLayer, continued

if TYPE_CHECKING:
    from quantkit.checkpoint import Checkpoint

WITHOUT_CALIBRATION = "Or convert without calibration: --method mse, in a recipe decode.method: mse."
_QUANTIZATION = ("quantization_config", "compression_config")


def libraries() -> tuple[Any, Any]:
    """torch and transformers.

    Raises:
        EnvironmentProblem: not installed.
    """
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise missing(error.name) from None
    return torch, transformers


def missing(library: str) -> EnvironmentProblem:
    """The error for a library of the extra ``calibrate`` that is not there."""
    return EnvironmentProblem(
        f"calibration runs the model and needs {library}, which is not installed",
        hint=f"Run: pip install 'quantkit[calibrate]'. {WITHOUT_CALIBRATION}",
    )


def check_model(checkpoint: Checkpoint) -> None:
    """Refuse, before any work, a model that calibration cannot run; takes a fraction of a second.

    Raises:
        UnsupportedError: transformers has no such model, or not with experts that can be streamed.
        EnvironmentProblem: torch or transformers is not installed.
    """
    for number, layer in enumerate(model_on_meta(checkpoint).get_decoder().layers):
        experts_of(layer, number)


def model_on_meta(checkpoint: Checkpoint, further: Sequence[PredictionLayer] = ()) -> Any:
    """The causal language model of a checkpoint in evaluation mode, with float32 weights on the meta device.

    Args:
        further: multi-token-prediction layers that it gets as decoder layers after its own.

    Raises:
        UnsupportedError: transformers has no such model.
        EnvironmentProblem: torch or transformers is not installed.
    """
    torch, transformers = libraries()
    try:
        config = _config(checkpoint.config, transformers, further)
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except UnsupportedError:
        raise
    except Exception as error:  # each model checks its configuration in its own way
        raise UnsupportedError(
            f"transformers {transformers.__version__} cannot build this model: {error}", where="config.json",
            accepted="for calibration, a model that transformers runs", hint=WITHOUT_CALIBRATION,
        ) from error  # fmt: skip
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = IMPLEMENTATION
    return model.eval()


def _config(content: Mapping[str, Any], transformers: Any, further: Sequence[PredictionLayer]) -> Any:
    """The language model's configuration, by its model type or (kimi_k2) by its architecture."""
    text = {k: v for k, v in text_config(content).items() if k not in _QUANTIZATION}
    model_type = text.pop("model_type", None)
    known = transformers.CONFIG_MAPPING
    architecture = getattr(transformers, next(iter(text.get("architectures") or ()), ""), None)
    if model_type in known:
        config_class = known[model_type]
    elif architecture is not None:
        config_class = architecture.config_class
    else:
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no model of type {model_type!r}", where="config.json",
            accepted="for calibration, a model that transformers runs", hint=WITHOUT_CALIBRATION,
        )  # fmt: skip
    config = config_class.from_dict(text)
    return config_class.from_dict(text | continued(config, further)) if further else config


def experts_of(layer: Any, number: int) -> Any:
    """The module of a layer's routed experts; None for a dense layer.

    Raises:
        UnsupportedError: experts that calibration can't stream.
    """
    found = [m for m in layer.modules() if hasattr(m, "_apply_gate") and hasattr(m, "is_concatenated")]
    if not found:
        return None
    odd = len(found) > 1 or found[0].has_bias or not found[0].has_gate
    if odd:
        raise UnsupportedError(
            "experts of a kind that calibration does not know", where=f"layer {number}: {type(found[0]).__name__}",
            accepted="one module of gated experts without biases", hint=WITHOUT_CALIBRATION,
        )  # fmt: skip
    return found[0]
