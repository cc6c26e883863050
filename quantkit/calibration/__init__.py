"""Calibrated INT4: what a weight becomes when its inputs are known, and how they become known.

Numerics, without files and models: ``hessian.py`` gathers what is known of a linear's inputs, ``gptq.py`` (with
``factor.py`` and ``compensate.py``) and ``awq.py`` quantize with it. Streaming: ``samples.py`` chooses the text,
``skeleton.py``, ``stream.py`` and ``experts.py`` carry it through the model with one expert in memory, and
``expert.py`` calibrates one; ``linears.py`` and ``linear.py`` do the same for linears outside the experts. torch
and transformers are imported by the functions that use them.
"""

from .awq import Fold, fold_expert, round_by_importance
from .gptq import Calibrated, GptqSettings, gptq
from .hessian import Hessian

__all__ = [
    "Calibrated",
    "Fold",
    "GptqSettings",
    "Hessian",
    "fold_expert",
    "gptq",
    "round_by_importance",
]
