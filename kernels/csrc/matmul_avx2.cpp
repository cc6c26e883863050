#if defined(__AVX2__) && defined(__FMA__)
#define QK_WIDTH 8
#include "matmul_float.h"

extern "C" const QkMatmulOps* qk_matmul_avx2() { return &OPS; }
#else
#include "matmul.h"
extern "C" const QkMatmulOps* qk_matmul_avx2() { return nullptr; }
#endif
