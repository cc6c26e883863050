#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define QK_WIDTH 16
#include "matmul_bf16.h"

extern "C" const QkMatmulOps* qk_matmul_avx512_bf16() { return &OPS; }
#else
#include "matmul.h"
extern "C" const QkMatmulOps* qk_matmul_avx512_bf16() { return nullptr; }
#endif
