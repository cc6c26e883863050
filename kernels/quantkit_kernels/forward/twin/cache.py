"""Reference of ``forward/cache.py``: the stored bytes and the gathered values are the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit_kernels.forward.pages import LATENT_BLOCK, GqaLayout, IndexLayout, MlaLayout
from quantkit_kernels.types import FP8_MAX, FP8_ZERO_SCALE

NAN_CODE = 0x7F


def store_gqa(pages: Tensor, layout: GqaLayout, slots: Tensor, key: Tensor, value: Tensor) -> None:
    to = layout.views(pages)
    page, offset, used = _places(layout.page_size, slots)
    for part, scales, values in ((to.key, to.key_scale, key[used]), (to.value, to.value_scale, value[used])):
        if scales is None:
            part[page, :, offset] = values
        else:
            codes, scale = quantize(values)
            part.view(torch.uint8)[page, :, offset] = codes
            scales[page, :, offset] = scale


def store_mla(pages: Tensor, layout: MlaLayout, slots: Tensor, latent: Tensor, rope: Tensor) -> None:
    to = layout.views(pages)
    page, offset, used = _places(layout.page_size, slots)
    to.rope[page, offset] = rope[used]
    if to.scale is None:
        to.latent[page, offset] = latent[used]
    else:
        codes, scale = quantize(latent[used].view(-1, layout.latent // LATENT_BLOCK, LATENT_BLOCK))
        to.latent.view(torch.uint8)[page, offset] = codes.flatten(1)
        to.scale[page, offset] = scale


def store_index_keys(pages: Tensor, layout: IndexLayout, slots: Tensor, keys: Tensor) -> None:
    to = layout.views(pages)
    page, offset, used = _places(layout.page_size, slots)
    if to.scale is None:
        to.key[page, offset] = keys[used]
    else:
        codes, scale = quantize(keys[used])
        to.key.view(torch.uint8)[page, offset] = codes
        to.scale[page, offset] = scale


def gather_gqa(
    pages: Tensor, layout: GqaLayout, block_table: Tensor, lengths: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    shape = (len(lengths), longest, layout.num_kv_heads, layout.head_dim)
    key, value = (pages.new_zeros(shape, dtype=torch.bfloat16) for _ in range(2))
    for r, length in enumerate(lengths.tolist()):
        k, v = read_gqa(pages, layout, block_table[r], length)
        key[r, :length], value[r, :length] = k.bfloat16(), v.bfloat16()
    return key, value


def gather_mla(
    pages: Tensor, layout: MlaLayout, block_table: Tensor, lengths: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    views = layout.views(pages)
    latent, rope = (
        pages.new_zeros((len(lengths), longest, part.shape[-1]), dtype=torch.bfloat16)
        for part in (views.latent, views.rope)
    )
    for r, length in enumerate(lengths.tolist()):
        values, rotary = read_mla(pages, layout, block_table[r], length)
        latent[r, :length], rope[r, :length] = values.bfloat16(), rotary.bfloat16()
    return latent, rope


def gather_index_keys(
    pages: Tensor, layout: IndexLayout, block_table: Tensor, lengths: Tensor, longest: int
) -> Tensor:
    keys = pages.new_zeros((len(lengths), longest, layout.views(pages).key.shape[-1]), dtype=torch.bfloat16)
    for r, length in enumerate(lengths.tolist()):
        keys[r, :length] = read_index_keys(pages, layout, block_table[r], length).bfloat16()
    return keys


def copy_pages(pages: Tensor, source: Tensor, target: Tensor) -> None:
    pages[target] = pages[source]


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes as uint8 ``[..., n]`` and float32 scales ``[...]`` of bfloat16 ``[..., n]``; rule in pages.py."""
    x = values.float()
    finite = x.isfinite()
    scale = x.abs().where(finite, x.new_zeros(())).amax(-1) / FP8_MAX
    scale = scale.where(scale > 0, scale.new_tensor(FP8_ZERO_SCALE))
    code = (x / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return code.where(finite, code.new_tensor(NAN_CODE)), scale


def read_gqa(pages: Tensor, layout: GqaLayout, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """float32 keys and values ``[length, Hkv, D]`` of one request, whose row of the block table is ``table``."""
    views = layout.views(pages)
    page, offset = positions(layout.page_size, table, length)

    def values(part: Tensor, scale: Tensor | None) -> Tensor:
        x = at(part, page, slice(None), offset).float()
        return x if scale is None else x * scale[page, :, offset][..., None]

    return values(views.key, views.key_scale), values(views.value, views.value_scale)


def read_mla(pages: Tensor, layout: MlaLayout, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """float32 latents ``[length, L]`` and rotary parts ``[length, R]`` of one request."""
    views = layout.views(pages)
    page, offset = positions(layout.page_size, table, length)
    latent = at(views.latent, page, offset).float()
    if views.scale is not None:
        latent = latent * views.scale[page, offset].repeat_interleave(LATENT_BLOCK, dim=1)
    return latent, views.rope[page, offset].float()


def read_index_keys(pages: Tensor, layout: IndexLayout, table: Tensor, length: int) -> Tensor:
    """float32 ``[length, 128]`` of one request."""
    views = layout.views(pages)
    page, offset = positions(layout.page_size, table, length)
    keys = at(views.key, page, offset).float()
    return keys if views.scale is None else keys * views.scale[page, offset][:, None]


def positions(page_size: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Page and offset of each position below ``length``."""
    position = torch.arange(length, device=table.device)
    return table[position // page_size].long(), position % page_size


def at(part: Tensor, *index: Tensor | slice) -> Tensor:
    """``part[index]`` for any type: torch does not index FP8 tensors on every device."""
    if part.dtype != torch.float8_e4m3fn:
        return part[index]
    return part.view(torch.uint8)[index].view(torch.float8_e4m3fn)


def _places(page_size: int, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Page and offset of each used slot, and which tokens have one."""
    used = slots >= 0
    return slots[used] // page_size, slots[used] % page_size, used
