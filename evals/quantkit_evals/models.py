"""Load a directory with transformers, refusing what transformers would load silently wrong.

``from_pretrained`` fills missing weights with random numbers and ignores unknown ones with a warning. Here both
are errors, except layers beyond ``num_hidden_layers`` (multi-token prediction), which transformers does not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from logging import ERROR, getLogger
from os import PathLike
from typing import Any

from quantkit.errors import SourceError

from .extras import require


def load_model(directory: str | PathLike[str], *, dtype: str = "bfloat16") -> Any:
    """A causal language model of transformers in evaluation mode, on the CPU.

    Args:
        directory: checkpoint in the Hugging Face layout; a ``quantization_config`` is followed
            (compressed-tensors).
        dtype: arithmetic of everything that is not quantized: ``bfloat16`` or ``float32``.

    Raises:
        SourceError: weights are missing, unknown to the model or of another shape.
        EnvironmentProblem: the extra ``eval`` is not installed.
    """
    transformers: Any = require("transformers")
    torch: Any = require("torch")
    with quiet():
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=getattr(torch, dtype), output_loading_info=True, local_files_only=True
        )
    num_layers = model.config.get_text_config().num_hidden_layers
    problems = {
        "missing": sorted(report["missing_keys"]),
        "unknown": [k for k in sorted(report["unexpected_keys"]) if not _is_beyond(k, num_layers)],
        "of another shape": sorted(str(k) for k in report["mismatched_keys"]),
    }
    for kind, names in problems.items():
        if names:
            raise SourceError(f"{len(names)} weights are {kind}, first {names[0]}", where=str(directory))
    return model.eval()


@contextmanager
def quiet() -> Iterator[None]:
    """No reports and progress bars on stderr.

    For loading, since what they say is checked afterwards, and for the first forward pass, when compressed-tensors
    decompresses.
    """
    logging: Any = require("transformers").logging
    matching = getLogger("compressed_tensors.utils.match")
    level, verbosity = matching.level, logging.get_verbosity()
    matching.setLevel(ERROR)  # it warns of patterns for experts, which transformers fuses and loads all the same
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):  # progress bars of compressed-tensors have no other switch
            yield
    finally:
        matching.setLevel(level)
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


def _is_beyond(name: str, num_layers: int) -> bool:
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= num_layers
