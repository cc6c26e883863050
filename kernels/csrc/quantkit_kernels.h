// C ABI of the native conversion kernels, called through ctypes by quantkit_kernels/native.py.
//
// All strides are in elements. Inputs have contiguous columns and a row stride >= 0; outputs are contiguous. The
// caller has checked shapes and alignment. Every function runs in the calling thread, keeps no state and returns
// QK_OK or the kind of the first bad number in row-major order, whose row (of this tile) and column go to `where`.
#ifndef QUANTKIT_KERNELS_H
#define QUANTKIT_KERNELS_H

#include <stdint.h>

#if defined(_WIN32)
#define QK_EXPORT extern "C" __declspec(dllexport)
#else
#define QK_EXPORT extern "C" __attribute__((visibility("default")))
#endif

enum { QK_OK = 0, QK_NAN_CODE = 1, QK_NON_FINITE = 2, QK_BAD_ARGUMENT = 3, QK_NO_MEMORY = 4 };
// AVX2 includes FMA; AVX512_BF16 also means VNNI and VBMI (Zen 4, Sapphire Rapids and newer).
enum { QK_PORTABLE = 0, QK_AVX2 = 1, QK_AVX512 = 2, QK_AVX512_BF16 = 3, QK_NUM_ISA = 4 };

// An FP8 weight, or a tile of its rows that starts at row `row_offset` of the whole weight.
struct QkFp8 {
    const uint8_t* codes;
    int64_t stride;
    const float* scales;  // of the whole weight
    int64_t scale_stride;
    int64_t rows, columns;
    int64_t block_rows, block_columns, row_offset;
};

// A plain weight: bf16 bits or float32.
struct QkPlain {
    const void* data;
    int64_t stride;
    int64_t rows, columns;
    int32_t is_bf16;
};

// A group INT4 weight to read.
struct QkInt4 {
    const uint32_t* packed;
    int64_t stride;
    const uint16_t* scale;  // bf16 bits
    int64_t scale_stride;
    int64_t rows, columns, group_size;
};

// A group INT4 weight to write: packed [rows, columns / 8], the others [rows, columns / group_size].
struct QkInt4Out {
    uint32_t* packed;
    uint16_t* scale;
    float* error;
    float* energy;
    int64_t group_size;
    const float* factors;  // candidates of the scale search, see search.py
    int64_t num_factors;
    int32_t is_unbiased;  // the scale of output gain 1 is stored, see search.py; only without importance
    const float* importance;  // [columns], what a squared error counts in the search; null: each counts 1
    int64_t* counts;  // [16], to which the number of weights of each stored code is added; null: not wanted
};

// The operations of one instruction set.
struct QkOps {
    int (*fp8_to_float32)(const QkFp8*, float* out, int64_t* where);
    int (*fp8_to_bf16)(const QkFp8*, uint16_t* out, int64_t* where);
    int (*fp8_to_int4)(const QkFp8*, const QkInt4Out*, int64_t* where);
    int (*plain_to_int4)(const QkPlain*, const QkInt4Out*, int64_t* where);
    int (*int4_to_float32)(const QkInt4*, float* out);
    int (*int4_to_bf16)(const QkInt4*, uint16_t* out);
    int (*plain_to_fp8)(const QkPlain*, int64_t block_rows, int64_t block_columns, uint8_t* codes, float* scales,
                        int64_t* where);
    int (*bf16_to_float32)(const uint16_t*, int64_t count, float* out);
    int (*float32_to_bf16)(const float*, int64_t count, uint16_t* out);
};

// Null where this build does not hold the instruction set.
extern "C" const QkOps* qk_ops_portable();
extern "C" const QkOps* qk_ops_avx2();
extern "C" const QkOps* qk_ops_avx512();

#endif
