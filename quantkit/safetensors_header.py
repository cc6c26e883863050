"""The safetensors header as quantkit writes it: known before any data, the same bytes every time.

Why our own and not ``safetensors.serialize``: a streaming writer must put the header first and fill in the
data later, and the library's output order depends on a hash map when there is more than one metadata key.
Entries stand in file order, keys without spaces, one metadata key, spaces up to a multiple of eight bytes
(as the library pads, so that tensor data is aligned).

Source: safetensors format description, https://huggingface.co/docs/safetensors (section "Format").
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from .scheme import OutputTensor

ALIGNMENT = 8


def render_header(tensors: Iterable[OutputTensor]) -> bytes:
    """Length prefix and JSON of a file that holds ``tensors`` back to back in this order.

    Raises:
        ValueError: two tensors of one name.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in tensors:
        if t.name in entries:
            raise ValueError(f"tensor {t.name!r} appears twice in one file")
        start, end = end, end + t.nbytes
        entries[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
