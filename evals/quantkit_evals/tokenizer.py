"""The tokenizer that a checkpoint's files describe, as transformers has it: offline, without code of the files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantkit.errors import ArtifactError, UsageError

from .extras import require

FAST = "tokenizer.json"


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of any kind.

    Raises:
        UsageError: there is none.
        ArtifactError: it can't be loaded.
    """
    transformers: Any = require("transformers")
    if not (folder / "tokenizer_config.json").is_file():
        raise UsageError("has no tokenizer (tokenizer_config.json)", where=str(folder))
    return _loaded(transformers.AutoTokenizer.from_pretrained, folder)


def load_fast_tokenizer(folder: Path) -> Any:
    """Of ``tokenizer.json``, which encodes many texts at once.

    Raises:
        UsageError: there is no such file.
        ArtifactError: it can't be loaded.
    """
    transformers: Any = require("transformers")
    check_fast_tokenizer(folder)
    return _loaded(transformers.PreTrainedTokenizerFast.from_pretrained, folder)


def check_fast_tokenizer(folder: Path) -> None:
    """
    Raises:
        UsageError: there is no ``tokenizer.json``.
    """
    if not (folder / FAST).is_file():
        raise UsageError(f"no {FAST} in this directory", where=str(folder))


def _loaded(load: Callable[..., Any], folder: Path) -> Any:
    try:
        return load(str(folder), local_files_only=True)
    except Exception as error:  # the tokenizers' library raises plain ones, transformers any kind
        said = str(error).strip() or type(error).__name__
        raise ArtifactError(f"its tokenizer can't be loaded: {said.splitlines()[0]}", where=str(folder)) from None
