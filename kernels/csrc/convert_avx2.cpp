// x86-64 with AVX2; setup.py adds the compiler flags. Without them (another processor) it is empty.
#if defined(__AVX2__)
#define QK_WIDTH 8
#include "convert_impl.h"

extern "C" const QkOps* qk_ops_avx2() { return &OPS; }
#else
#include "quantkit_kernels.h"
extern "C" const QkOps* qk_ops_avx2() { return nullptr; }
#endif
