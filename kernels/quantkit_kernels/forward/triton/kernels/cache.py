"""Quantizing into pages, reading them back, copying them. A program does a row of values that share a scale."""

import triton
import triton.language as tl

from .common import bf16_to_float, float_to_bf16, float_to_fp8, fp8_to_float, is_finite


@triton.jit
def quantize(x):
    """Codes [C] and scale of float32 x [C], by the rule of forward/pages.py."""
    is_number = is_finite(x)
    largest = tl.max(tl.where(is_number, tl.abs(x), 0.0), 0)
    scale = tl.div_rn(largest, largest * 0.0 + 448.0)
    scale = tl.where(scale > 0.0, scale, 1.1920928955078125e-07)  # FP8_ZERO_SCALE
    ratio = tl.div_rn(x, x * 0.0 + scale)
    ratio = tl.minimum(tl.maximum(tl.where(is_number, ratio, 0.0), -448.0), 448.0)
    return tl.where(is_number, float_to_fp8(ratio), 0x7F), scale


@triton.jit
def store_rows_kernel(slots, x, x_token, x_head, x_column, codes, codes_page, codes_head,
                      codes_token, scales, scales_page, scales_head, scales_token, page_size,
                      columns, FP8: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Rows [T, heads, C] of bf16 to their tokens' slots, as codes and a scale, or as they are.

    A head is what has a scale of its own: a key-value head, or a block of a latent's columns.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    column = tl.arange(0, BLOCK)
    page, offset = slot // page_size, slot % page_size
    value = tl.load(x + token * x_token + head * x_head + column * x_column, mask=column < columns, other=0.0)
    target = codes + page * codes_page + head * codes_head + offset * codes_token + column
    if FP8:
        code, scale = quantize(bf16_to_float(value))
        tl.store(target, code, mask=column < columns)
        tl.store(scales + page * scales_page + head * scales_head + offset * scales_token, scale)
    else:
        tl.store(target, value, mask=column < columns)


@triton.jit
def gather_rows_kernel(codes, codes_page, codes_head, codes_token, scales, scales_page, scales_head,
                       scales_token, table, table_stride, lengths, out, out_request, out_token,
                       out_head, page_size, columns, FP8: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Rows of request, position and head to bf16; zeros beyond a request's length."""
    position, request = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_used = position < tl.load(lengths + request)
    page = tl.load(table + request * table_stride + position // page_size, mask=is_used, other=0).to(tl.int64)
    offset = position % page_size
    source = codes + page * codes_page + head * codes_head + offset * codes_token + column
    if FP8:
        place = scales + page * scales_page + head * scales_head + offset * scales_token
        scale = tl.load(place, mask=is_used, other=0.0)
        code = tl.load(source, mask=(column < columns) & is_used, other=0)
        value = float_to_bf16(fp8_to_float(code) * scale)
    else:
        value = tl.load(source, mask=(column < columns) & is_used, other=0.0)
    target = out + request * out_request + position * out_token + head * out_head + column
    tl.store(target, value, mask=column < columns)


@triton.jit
def copy_pages_kernel(pages, stride, source, target, size, BLOCK: tl.constexpr):
    """Elements of whole pages; a program copies BLOCK of one page."""
    pair = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(pages + tl.load(source + pair) * stride + i, mask=i < size, other=0)
    tl.store(pages + tl.load(target + pair) * stride + i, value, mask=i < size)
