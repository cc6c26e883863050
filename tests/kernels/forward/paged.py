"""Independent reading of KV pages, from the byte layouts in pages.py's text, and plain attention in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit_kernels.forward.pages import GqaLayout, IndexLayout, MlaLayout, PageLayout

F64 = NDArray[np.float64]


def e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([e4m3(code) for code in range(256)])


def codes(raw: NDArray[np.uint8]) -> F64:
    return E4M3[raw]


def bf16(raw: NDArray[np.uint8]) -> F64:
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def f32(raw: NDArray[np.uint8]) -> F64:
    return raw.view(np.float32).astype(np.float64)


def gqa_token(page: NDArray[np.uint8], layout: GqaLayout, offset: int) -> tuple[F64, F64]:
    """Keys and values [Hkv, D] of one token of a page."""
    heads, size, dim = layout.num_kv_heads, layout.page_size, layout.head_dim
    parts = []
    for second in (0, 1):
        if layout.kv_dtype == "bf16":
            all_values = bf16(page[: 4 * heads * size * dim].copy()).reshape(2, heads, size, dim)
            parts.append(all_values[second, :, offset])
            continue
        scales = f32(page[: 8 * heads * size].copy()).reshape(2, heads, size)
        start = 8 * heads * size + second * heads * size * dim
        part = codes(page[start : start + heads * size * dim]).reshape(heads, size, dim)
        parts.append(part[:, offset] * scales[second, :, offset, None])
    return parts[0], parts[1]


def mla_token(page: NDArray[np.uint8], layout: MlaLayout, offset: int) -> tuple[F64, F64]:
    """Latent [512] and rotary part [64] of one token of a page."""
    if layout.kv_dtype == "bf16":
        record = bf16(page[offset * 1152 : (offset + 1) * 1152].copy())
        return record[:512], record[512:]
    raw = page[offset * 656 : (offset + 1) * 656].copy()
    scales = f32(raw[512:528])
    latent = codes(raw[:512]).reshape(4, 128) * scales[:, None]
    return latent.reshape(512), bf16(raw[528:])


def index_token(page: NDArray[np.uint8], layout: IndexLayout, offset: int) -> F64:
    if layout.kv_dtype == "bf16":
        return bf16(page[offset * 256 : (offset + 1) * 256].copy())
    size = layout.page_size
    scales = f32(page[128 * size : 132 * size].copy())
    return codes(page[offset * 128 : (offset + 1) * 128]) * scales[offset]


def context(pages: Tensor, layout: Any, table: Tensor, length: int) -> tuple[F64, ...]:
    """What ``TYPE_token`` gives for positions 0..length-1 of a request, stacked; also for 0 tokens."""
    read = {GqaLayout: gqa_token, MlaLayout: mla_token, IndexLayout: index_token}[type(layout)]
    page_at = [int(table[i // layout.page_size]) for i in range(length)]
    tokens = [read(pages[p].numpy(), layout, i % layout.page_size) for i, p in enumerate(page_at)]
    if isinstance(layout, IndexLayout):
        return (np.array(tokens).reshape(length, 128),)
    if isinstance(layout, MlaLayout):
        shapes: tuple[tuple[int, ...], ...] = ((512,), (64,))
    else:
        shapes = ((layout.num_kv_heads, layout.head_dim),) * 2
    return tuple(np.array([t[i] for t in tokens]).reshape(length, *shapes[i]) for i in (0, 1))


def attention(query: F64, key: F64, value: F64, scale: float) -> F64:
    """[Hq, D] of one query over n tokens, key [n, Hkv, D], value [n, Hkv, Dv]: softmax(q k scale) v, plainly."""
    heads, kv_heads = query.shape[0], key.shape[1]
    out = np.zeros((heads, value.shape[2]))
    if not len(key):
        return out
    with np.errstate(invalid="ignore", over="ignore"):
        for head in range(heads):
            kv = head // (heads // kv_heads)
            score = key[:, kv] @ query[head] * scale
            weight = np.exp(score - score.max())
            out[head] = weight @ value[:, kv] / weight.sum()
    return out


def float64(tensor: Tensor) -> F64:
    return tensor.double().numpy()


def fill(layout: PageLayout, num_pages: int, generator: torch.Generator) -> Tensor:
    """A pool of random finite content: codes of every kind (subnormal, largest), scales near 1/200."""
    pages = layout.allocate(num_pages)
    pages.copy_(torch.randint(0, 256, pages.shape, generator=generator, dtype=torch.uint8))
    for part in layout.views(pages):  # type: ignore[attr-defined]
        if part is None:
            continue
        if part.dtype == torch.float8_e4m3fn:
            raw = part.view(torch.uint8)
            raw[(raw & 0x7F) == 0x7F] = 0x11
        elif part.dtype == torch.float32:
            part.copy_(torch.rand(part.shape, generator=generator) * 0.01 + 0.001)
        else:
            part.copy_(torch.randn(part.shape, generator=generator).bfloat16())
    return pages


def tables(
    layout: PageLayout, lengths: list[int], num_pages: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A block table of distinct random pages for these lengths, garbage beyond them; the lengths as a tensor."""
    need = [-(-n // layout.page_size) for n in lengths]
    order = torch.randperm(num_pages, generator=generator)[: sum(need)].int()
    table = torch.full((len(lengths), max([*need, 1]) + 1), -7, dtype=torch.int32)
    table[:, -1] = 2**31 - 1
    start = 0
    for row, count in enumerate(need):
        table[row, :count] = order[start : start + count]
        start += count
    return table, torch.tensor(lengths, dtype=torch.int32)


def assert_close(found: Tensor, expected: F64, largest: F64 | float, limit: float, rms: float) -> None:
    """Errors in units of ``largest`` (broadcast): at most ``limit``, in the root mean square ``rms``."""
    assert found.shape == expected.shape
    error = (float64(found) - expected) / np.maximum(largest, 1e-30)
    assert np.isfinite(error).all()
    if error.size:
        assert np.abs(error).max() <= limit, np.abs(error).max()
        assert np.sqrt(np.mean(error**2)) <= rms, np.sqrt(np.mean(error**2))


def assert_same(level: str, found: Tensor, expected: Tensor) -> None:
    """The same bits; from the twin, whose order of sums follows torch's choice of kernels, nearly the same."""
    if level == "torch":
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-9)
    else:
        assert torch.equal(found, expected)
