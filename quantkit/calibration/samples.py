"""The calibration set: samples of equal length from a text, tokenised with the source's own tokenizer.

Documents are tokenised one by one, chats through the tokenizer's chat template, and joined with the end-of-text
token where the tokenizer has one; no other special token is added. The stream is cut into pieces of the sample
length without overlap, and of those the ones are taken whose sha256 of ``seed:index`` is smallest: spread over the
whole text, the same on every machine and with every version of every library.

The digest covers the description (counts and file digests, no path) and every token id; it enters ``pair_id`` and
whatever resumes a conversion.

Left out: padding and samples that follow document borders; packed samples use every token of the text.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SourceError, UsageError
from .model import WITHOUT_CALIBRATION, missing
from .texts import Document, Texts, read_texts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..checkpoint import Checkpoint
    from ..recipe.sections import CalibrationSection

FORMAT = 1  # of the description; a change of what the digest covers changes it
TOKENIZER = "tokenizer.json"
_TOKENIZER_FILES = (
    TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationSet:
    """What a calibrated method learns from.

    Attributes:
        token_ids: int64 ``[samples, length]``.
        digest: sha256 over ``description`` and ``token_ids``.
        description: JSON-ready and the same wherever the same text lies: ``format``, ``text_sha256`` of each file,
            ``documents``, ``tokens`` in the whole text, ``samples``, ``length``, ``seed``.
    """

    token_ids: NDArray[np.int64]
    digest: str
    description: Mapping[str, Any]


def calibration_set(section: CalibrationSection, checkpoint: Checkpoint) -> CalibrationSet:
    """Read the text that a recipe names, and choose its samples.

    Args:
        section: of the recipe.
        checkpoint: the source; its tokenizer files are read, no weights.

    Raises:
        UsageError: the text cannot be used (``read_texts``), is too short, or holds chats that the tokenizer has
            no template for; samples longer than the model's context.
        SourceError: the source has no ``tokenizer.json``, a damaged one, or one of another model.
        EnvironmentProblem: a file cannot be read, or transformers is not installed.
    """
    _check_length(section.length, checkpoint.config)
    texts = read_texts(section.data, section.samples * section.length)
    stream = _stream(texts, checkpoint)
    _check_ids(stream, checkpoint)
    token_ids = _choose(stream, section)
    description = {
        "format": FORMAT, "text_sha256": list(texts.sha256), "documents": len(texts.documents),
        "tokens": len(stream), "samples": section.samples, "length": section.length, "seed": section.seed,
    }  # fmt: skip
    canonical = json.dumps(description, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    digest = hashlib.sha256(canonical + token_ids.astype("<i8").tobytes()).hexdigest()
    return CalibrationSet(token_ids, digest, description)


def _check_length(length: int, config: Mapping[str, Any]) -> None:
    inner = config.get("text_config")
    longest = (inner if isinstance(inner, Mapping) else config).get("max_position_embeddings")
    if isinstance(longest, int) and length > longest:
        raise UsageError(
            f"samples of {length:,} tokens are longer than the model's context", where="--length",
            accepted=f"at most {longest:,} (max_position_embeddings)",
        )  # fmt: skip


def _choose(stream: NDArray[np.int64], section: CalibrationSection) -> NDArray[np.int64]:
    """``[samples, length]``, in the order of the text."""
    import numpy as np

    samples, length, tokens = section.samples, section.length, len(stream)
    whole = tokens // length
    if whole < samples:
        ways = [f"--samples to {whole}"] if whole else []
        ways += [f"--length to {tokens // samples}"] if tokens // samples >= 2 else []
        if not ways and tokens >= 2:
            ways = [f"--length to {tokens} and --samples to 1"]
        lower = f"Lower {' or '.join(ways)}, or give" if ways else "Give"
        raise UsageError(
            f"the text has {tokens:,} tokens, which make {whole:,} samples of {length:,}; {samples:,} are wanted",
            where="--calibration", hint=f"{lower} more text.",
        )  # fmt: skip

    def draw(index: int) -> bytes:
        return hashlib.sha256(f"{section.seed}:{index}".encode()).digest()

    chosen = np.sort(np.asarray(heapq.nsmallest(samples, range(whole), key=draw), dtype=np.int64))
    found: NDArray[np.int64] = stream[: whole * length].reshape(whole, length)[chosen]
    return found


def _check_ids(stream: NDArray[np.int64], checkpoint: Checkpoint) -> None:
    inner = checkpoint.config.get("text_config")
    vocabulary = (inner if isinstance(inner, Mapping) else checkpoint.config).get("vocab_size")
    if isinstance(vocabulary, int) and stream.size and int(stream.max()) >= vocabulary:
        raise SourceError(
            f"the tokenizer gives token {int(stream.max())}, the model has {vocabulary}",
            where=f"{checkpoint.label}: {TOKENIZER}", hint="Use the tokenizer that was published with the model.",
        )  # fmt: skip


def _stream(texts: Texts, checkpoint: Checkpoint) -> NDArray[np.int64]:
    """All documents as one run of token ids ``[tokens]``."""
    import numpy as np

    tokenizer = _load_tokenizer(checkpoint)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # a tokenizer.json may ask for either, and quietly shorten what it is given
    backend.no_padding()
    rendered = [_render(document, tokenizer) for document in texts.documents]
    end = tokenizer.eos_token_id
    ids: list[int] = []
    for encoded in backend.encode_batch(rendered, add_special_tokens=False):
        ids += encoded.ids
        if end is not None and ids[-1:] != [end]:
            ids.append(end)
    return np.asarray(ids, dtype=np.int64)


def _render(document: Document, tokenizer: Any) -> str:
    if document.text is not None:
        return document.text
    if not tokenizer.chat_template:
        raise UsageError(
            "is a chat, and the source's tokenizer has no chat template", where=document.where,
            hint="Give plain text ('text'), or add the model's chat_template.jinja to the source.",
        )  # fmt: skip
    try:
        text = tokenizer.apply_chat_template(list(document.messages or ()), tokenize=False)
        text.encode()
    except Exception as error:  # a template is a program of the model's author and raises what it likes
        raise UsageError(f"the model's chat template refuses this chat: {error}", where=document.where) from error
    return str(text)


def _load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The fast tokenizer in the source's files; no code of the source is run."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise missing("transformers") from None
    there = {side.name for side in checkpoint.side_files}
    if TOKENIZER not in there:
        raise SourceError(
            f"there is no {TOKENIZER} to tokenise calibration text with", where=checkpoint.label,
            hint=f"Add the model's tokenizer files to the source. {WITHOUT_CALIBRATION}",
        )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="quantkit-tokenizer-") as folder:
        for name in _TOKENIZER_FILES:
            if name in there:
                Path(folder, name).write_bytes(checkpoint.side_bytes(name))
        try:
            return transformers.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # tokenizers raises bare exceptions
            raise SourceError(
                f"cannot be read as a tokenizer: {error}", where=f"{checkpoint.label}: {TOKENIZER}"
            ) from error
