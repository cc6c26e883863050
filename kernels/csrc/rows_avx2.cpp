#if defined(__AVX2__)
#include "rows_impl.h"

extern "C" const QkRowOps* qk_rows_avx2() { return &OPS; }
#else
#include "rows.h"
extern "C" const QkRowOps* qk_rows_avx2() { return nullptr; }
#endif
