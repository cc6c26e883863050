#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define QK_WIDTH 16
#include "matmul_float.h"

extern "C" const QkMatmulOps* qk_matmul_avx512() { return &OPS; }
#else
#include "matmul.h"
extern "C" const QkMatmulOps* qk_matmul_avx512() { return nullptr; }
#endif
