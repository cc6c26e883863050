"""Page tags: a program compares a request's entries."""

import triton
import triton.language as tl


@triton.jit
def check_page_tags_kernel(table, table_stride, pages, pages_stride, tags, tags_stride, pool, counts, out, entries,
                           num_pages, BLOCK: tl.constexpr):  # fmt: skip
    """out: 1 where every entry that counts is a page of the pool, the expected one, with the expected tag."""
    request = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + request)
    bad = ((count < 0) | (count > entries)).to(tl.int32)
    for first in range(0, tl.minimum(tl.maximum(count, 0), entries), BLOCK):
        i = first + tl.arange(0, BLOCK)
        is_used = (i < count) & (i < entries)
        page = tl.load(table + request * table_stride + i, mask=is_used, other=0)
        expected = tl.load(pages + request * pages_stride + i, mask=is_used, other=0)
        is_page = is_used & (page >= 0) & (page < num_pages)
        tag = tl.load(pool + page.to(tl.int64), mask=is_page, other=0)
        wanted = tl.load(tags + request * tags_stride + i, mask=is_page, other=0)
        is_good = is_page & (page == expected) & (tag == wanted)
        bad += tl.sum((is_used & (is_good == 0)).to(tl.int32), 0)
    tl.store(out + request, bad == 0)
