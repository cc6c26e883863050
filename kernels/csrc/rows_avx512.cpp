#if defined(__AVX512F__) && defined(__AVX512BW__)
#include "rows_impl.h"

extern "C" const QkRowOps* qk_rows_avx512() { return &OPS; }
#else
#include "rows.h"
extern "C" const QkRowOps* qk_rows_avx512() { return nullptr; }
#endif
