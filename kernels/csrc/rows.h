// C ABI of what is done to rows of activations between products: norms and rotary embeddings.
//
// The caller has checked shapes, strides and alignment. Strides are in elements, columns contiguous. All members of
// a call are eight bytes wide: Python passes an array of integers.
#ifndef QK_ROWS_H
#define QK_ROWS_H

#include "quantkit_kernels.h"

// out = bf16(weight * bf16(x / sqrt(mean(x^2) + epsilon))), row by row.
struct QkNorm {
    const uint16_t* x;  // bf16 [rows, columns]
    int64_t stride, rows, columns;
    const float* weight;  // [columns]
    double epsilon;
    uint16_t* out;  // bf16 [rows, columns], contiguous
};

// out = bf16(a + b), all contiguous.
struct QkAdd {
    const uint16_t *a, *b;
    int64_t count;
    uint16_t* out;
};

// The first 2 * pairs columns of every head are rotated by the token's angles, the others pass.
struct QkRotate {
    const uint16_t* x;  // bf16 [tokens, heads, columns]
    int64_t token_stride, head_stride;
    int64_t tokens, heads, columns, pairs;
    int64_t is_interleaved;  // column 2i with 2i + 1, left as i and i + pairs; else column i with i + pairs
    const float* cos;        // [tokens, pairs]
    const float* sin;
    int64_t angle_stride;
    uint16_t* out;  // bf16 [tokens, heads, columns], contiguous
};

struct QkRowOps {
    void (*norm)(const QkNorm*, int threads);
    void (*add)(const QkAdd*, int threads);
    void (*rotate)(const QkRotate*, int threads);
};

extern "C" const QkRowOps* qk_rows_portable();
extern "C" const QkRowOps* qk_rows_avx2();
extern "C" const QkRowOps* qk_rows_avx512();

#endif
