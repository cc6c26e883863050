// C ABI of attention over pages and of the DSA indexer; called by quantkit_kernels/forward/cpu.
//
// The caller has checked page ids, lengths, chunks and indices. Strides are in elements unless they say bytes; the
// columns of every tensor are contiguous.
#ifndef QK_ATTENTION_H
#define QK_ATTENTION_H

#include "cache.h"

struct QkRows {  // bf16 [tokens, heads, columns]; null where there is none
    const uint16_t* data;
    int64_t token_stride, head_stride;
};

// Grouped-query attention: `key` and `value` have a group for each key-value head. Latent attention (is_latent):
// `key` is the latent, a group for each scale, and its values too; `value` is the rotary part of the keys.
struct QkAttention {
    QkPool pool;
    QkPart key, value;
    int32_t is_latent;
    int32_t is_prefill;
    const int32_t* table;  // [requests, ...]
    int64_t table_stride;
    const int32_t* lengths;  // [requests]
    const int32_t* starts;   // [requests + 1], where a request's queries start
    const int32_t* indices;  // [tokens, num_indices], -1 for none; null: all that is visible
    int64_t indices_stride, num_indices;
    QkRows query, query_rope;
    QkRows fresh_key, fresh_value;  // of the chunk's own tokens
    int64_t requests, tokens, heads;
    float scale;
    uint16_t* out;  // bf16 [tokens, heads, columns of a value], contiguous
};

struct QkIndexScores {
    QkPool pool;
    QkPart key;
    const int32_t* table;
    int64_t table_stride;
    const int32_t* rows;     // [tokens], of the table
    const int32_t* lengths;  // [tokens]
    QkRows query;
    const float* weights;  // [tokens, heads], contiguous
    int64_t tokens, heads, longest;
    float* out;  // [tokens, longest]
};

// The k best of the first lengths[t] scores of each row, positions ascending, -1 behind the last.
struct QkIndexTopk {
    const float* scores;  // [tokens, longest]
    int64_t stride;
    const int32_t* lengths;  // [tokens]
    int64_t tokens, longest, k;
    int32_t* out;  // [tokens, k], contiguous
};

struct QkAttentionOps {
    int (*attention)(const QkAttention*, int threads);
    int (*index_scores)(const QkIndexScores*, int threads);
};

extern "C" const QkAttentionOps* qk_attention_portable();
extern "C" const QkAttentionOps* qk_attention_avx2();
extern "C" const QkAttentionOps* qk_attention_avx512();
extern "C" const QkAttentionOps* qk_attention_avx512_bf16();

#endif
