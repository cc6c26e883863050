"""Calibrated INT4 as pure numerics: inputs and weights in, INT4 weights out. No files, no models, no streaming.

``hessian.py`` gathers what is known of a linear's inputs, ``gptq.py`` (with ``factor.py`` and ``compensate.py``)
and ``awq.py`` quantize with it. torch is imported by the functions that use it.
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
