// C ABI of the paged cache: storing into, gathering from and copying pages, and where attention finds a token.
//
// The caller has checked every slot, page id and length against the pool.
#ifndef QK_CACHE_H
#define QK_CACHE_H

#include "quantkit_kernels.h"

// Where one part of a token lies in a page, e.g. its keys: `groups` runs of `columns` values, each run with one
// float32 scale in FP8. Offsets and strides in bytes. See quantkit_kernels/forward/pages.py for the layouts.
struct QkPart {
    int64_t start, group_stride, token_stride;
    int64_t scale_start, scale_group_stride, scale_token_stride;
    int64_t groups, columns;
    int32_t is_fp8;  // else bf16
};

struct QkPool {
    uint8_t* pages;
    int64_t stride;  // bytes from page to page
    int64_t page_size;
};

struct QkStore {
    QkPool pool;
    QkPart part;
    const int64_t* slots;  // [tokens], -1: skip
    int64_t slot_stride;
    const uint16_t* values;  // bf16 [tokens, groups, columns], columns contiguous; strides in elements
    int64_t token_stride, group_stride;
    int64_t tokens;
};

struct QkGather {
    QkPool pool;
    QkPart part;
    const int32_t* table;  // [requests, ...], rows contiguous
    int64_t table_stride;
    const int32_t* lengths;
    int64_t length_stride;
    int64_t requests, longest;
    uint16_t* out;  // bf16 [requests, longest, groups * columns], contiguous
};

struct QkCacheOps {
    int (*store)(const QkStore*, int threads);
    int (*gather)(const QkGather*, int threads);
};

extern "C" const QkCacheOps* qk_cache_portable();
extern "C" const QkCacheOps* qk_cache_avx2();
extern "C" const QkCacheOps* qk_cache_avx512();

#endif
