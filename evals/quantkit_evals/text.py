"""Text as blocks of token ids, the same for every run and every copy of one tokenizer.

Documents (separated by an empty line) are tokenised one by one and joined with the end-of-text token, as in the
training of the bundled models; the stream is then cut into blocks of equal length, without overlap. Blocks are the
unit of every standard error: neighbouring tokens depend on each other, blocks nearly don't.

Left out: shuffling and padding. A count smaller than the text spreads the blocks evenly over it, so that a bounded
run still sees every source in the text.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.data import TEXTS, bundled_text
from quantkit.errors import UsageError

from .tokenizer import load_fast_tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK_TOKENS = 256


def token_blocks(
    checkpoint: str | PathLike[str],
    text: str | PathLike[str] = "heldout",
    *,
    num_blocks: int | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> NDArray[np.int64]:
    """Blocks of token ids of a text, tokenised by the ``tokenizer.json`` of a checkpoint directory.

    Args:
        checkpoint: directory that holds ``tokenizer.json`` and ``tokenizer_config.json``.
        text: a bundled text (``heldout``, ``calib``) or the path of a UTF-8 file.
        num_blocks: how many blocks, spread evenly over the text; None takes all whole blocks.
        block_tokens: tokens per block; at least 2, since the first token of a block is never predicted.

    Returns:
        int64 array ``[num_blocks, block_tokens]``; the same for the same arguments.

    Raises:
        UsageError: no such text, it is too short, or the numbers make no sense; no ``tokenizer.json``.
        ArtifactError: the tokenizer can't be loaded.
        EnvironmentProblem: the extra ``eval`` is not installed.
    """
    import numpy as np

    if block_tokens < 2:
        raise UsageError(f"{block_tokens} tokens in a block", where="block_tokens", accepted="2 or more")
    if num_blocks is not None and num_blocks < 1:
        raise UsageError(f"{num_blocks} blocks", where="num_blocks", accepted="1 or more, or None for all")
    stream = _tokenise(Path(checkpoint), text_path(text))
    whole = len(stream) // block_tokens
    wanted = whole if num_blocks is None else num_blocks
    if wanted < 1 or wanted > whole:
        raise UsageError(
            f"{len(stream)} tokens make {whole} blocks of {block_tokens}, {wanted or 1} wanted", where=str(text)
        )
    starts = (np.arange(wanted, dtype=np.int64) * whole // wanted) * block_tokens
    blocks: NDArray[np.int64] = stream[starts[:, None] + np.arange(block_tokens)]
    return blocks


def text_path(text: str | PathLike[str]) -> Path:
    """File of a bundled text or of the user's; UsageError when there is none."""
    path = bundled_text(str(text)) if str(text) in TEXTS else Path(text)
    if not path.is_file():
        raise UsageError("no such text", where=str(text), accepted=f"{', '.join(TEXTS)}, or the path of a file")
    return path


def _tokenise(checkpoint: Path, text: Path) -> NDArray[np.int64]:
    """One stream of token ids, an end-of-text token after each document."""
    import numpy as np

    tokenizer = load_fast_tokenizer(checkpoint)
    end = tokenizer.eos_token_id
    if end is None:
        raise UsageError(
            "the tokenizer names no end-of-text token", where=str(checkpoint / "tokenizer_config.json")
        )
    try:
        documents = text.read_text(encoding="utf-8-sig").split("\n\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 text: {error.reason} at byte {error.start}", where=str(text)) from None
    stream: list[int] = []
    for encoded in tokenizer.backend_tokenizer.encode_batch(documents, add_special_tokens=False):
        stream.extend(encoded.ids)
        stream.append(end)
    return np.asarray(stream, dtype=np.int64)
