#if defined(__AVX2__)
#define QK_WIDTH 8
#include "cache_impl.h"

extern "C" const QkCacheOps* qk_cache_avx2() { return &OPS; }
#else
#include "cache.h"
extern "C" const QkCacheOps* qk_cache_avx2() { return nullptr; }
#endif
