// x86-64 with AVX-512 F, BW, VL and DQ (Skylake-X, Zen 4 and newer); setup.py adds the compiler flags.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define QK_WIDTH 16
#include "convert_impl.h"

extern "C" const QkOps* qk_ops_avx512() { return &OPS; }
#else
#include "quantkit_kernels.h"
extern "C" const QkOps* qk_ops_avx512() { return nullptr; }
#endif
