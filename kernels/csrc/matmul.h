// C ABI of linears and experts over stored weights, called by quantkit_kernels/forward/cpu/{linear,experts}.py.
//
// The caller has checked shapes, strides, alignment and that nothing overlaps. Strides are in elements, columns
// contiguous where there is no stride for them. A function uses up to `threads` threads and returns QK_OK,
// QK_NO_MEMORY or QK_BAD_ID. A row gets the same bits whatever other rows there are and for any number of threads.
// All members of a call are eight bytes wide: Python passes an array of integers.
#ifndef QK_MATMUL_H
#define QK_MATMUL_H

#include "quantkit_kernels.h"

enum { QK_BAD_ID = 5 };  // beside the statuses of quantkit_kernels.h

// How weights are stored: group INT4 (scales bf16 [rows, columns / block_columns], block_rows 1), or e4m3 (scales
// float32 [ceil(rows / block_rows), ceil(columns / block_columns)]).
struct QkFormat {
    int64_t is_int4;
    int64_t block_rows, block_columns;
};

// out = x W^T.
struct QkLinear {
    QkFormat format;
    const void* codes;  // uint32 words of eight nibbles, or e4m3
    int64_t stride;
    const void* scale;
    int64_t scale_stride;
    int64_t outputs, inputs;
    const uint16_t* x;  // bf16 [rows, inputs]
    int64_t x_stride, rows;
    uint16_t* out;  // bf16 [rows, outputs], contiguous
};

// out[t] = sum over k of weights[t, k] * down(bf16(silu(gate(x)) * up(x))) of expert ids[t, k].
struct QkExperts {
    QkFormat format;
    const int64_t* pointers;  // [experts, 6]: gate, its scale, up, its scale, down, its scale
    const int64_t* strides;   // [experts, 6]
    int64_t experts, hidden, inner;
    const uint16_t* x;  // bf16 [tokens, hidden]
    int64_t x_stride, tokens, top;
    int64_t has_wide_ids;  // int64, else int32
    const void* ids;       // [tokens, top], in [0, experts) or -1: anything else is QK_BAD_ID
    int64_t ids_stride, ids_step;
    const float* weights;  // [tokens, top]
    int64_t weights_stride, weights_step;
    uint16_t* out;  // bf16 [tokens, hidden], contiguous
};

// out[b] = x[b] W[b]^T for bf16 weights, `batches` products of one shape.
struct QkPlainLinear {
    int64_t batches;
    const uint16_t* weight;  // bf16 [batches, outputs, inputs]
    int64_t weight_batch, stride;
    int64_t outputs, inputs;
    const uint16_t* x;  // bf16 [batches, rows, inputs]
    int64_t x_batch, x_stride, rows;
    int64_t is_float;
    void* out;  // float32 if is_float, else bf16 [batches, rows, outputs]
    int64_t out_batch, out_stride;
};

// Which tokens an expert has, by expert: pairs (token * top + k) ascending, those of experts that have any.
struct QkRouting {
    int64_t active;
    const int32_t* expert;  // [active], ascending
    const int32_t* first;   // [active + 1], into pairs
    const int32_t* pairs;
};

struct QkMatmulOps {
    int (*linear)(const QkLinear*, int threads);
    int (*experts)(const QkExperts*, const QkRouting*, int threads);
    int (*plain)(const QkPlainLinear*, int threads);
};

// Null where this build does not hold the instruction set.
extern "C" const QkMatmulOps* qk_matmul_portable();
extern "C" const QkMatmulOps* qk_matmul_avx2();
extern "C" const QkMatmulOps* qk_matmul_avx512();
extern "C" const QkMatmulOps* qk_matmul_avx512_bf16();

#endif
