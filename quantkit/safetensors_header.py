"""The header of a safetensors file, rendered the same way every time, and the order of bytes behind it.

Planning needs the exact size of a file before anything is written, writing needs the bytes, and both must
agree, so both use this. safetensors' own ``save_file`` is not used: it is not deterministic with more than
one metadata key and needs all tensors in memory.

Source: safetensors 0.8 format description: 8 bytes little-endian header length, JSON, padding with spaces to a
multiple of 8, then the data without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from .dtypes import BITS
from .scheme import OutputTensor

METADATA: Mapping[str, str] = {"format": "pt"}


def file_order(tensors: Iterable[OutputTensor]) -> tuple[OutputTensor, ...]:
    """The tensors in the order of their bytes: wide dtypes first, otherwise in the order given.

    The format allows no gaps, and readers reinterpret slices of the file as int64 or float32, which fails on an
    offset that is not a multiple of the width. Descending width keeps every tensor aligned.
    """
    return tuple(sorted(tensors, key=lambda t: -BITS[t.dtype]))


def render_header(tensors: Sequence[OutputTensor], metadata: Mapping[str, str] = METADATA) -> bytes:
    """Header of a file whose data are these tensors, back to back in this order (see :func:`file_order`).

    Includes the 8 bytes of length, so that ``len(render_header(...))`` is the offset of the first tensor.
    """
    parts = []
    if metadata:
        parts.append(f'"__metadata__":{_json(dict(metadata))}')
    offset = 0
    for t in tensors:
        stop = offset + t.nbytes
        shape = ",".join(map(str, t.shape))
        parts.append(f'{_json(t.name)}:{{"dtype":"{t.dtype}","shape":[{shape}],"data_offsets":[{offset},{stop}]}}')
        offset = stop
    body = ("{" + ",".join(parts) + "}").encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
