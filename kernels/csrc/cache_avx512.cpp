#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define QK_WIDTH 16
#include "cache_impl.h"

extern "C" const QkCacheOps* qk_cache_avx512() { return &OPS; }
#else
#include "cache.h"
extern "C" const QkCacheOps* qk_cache_avx512() { return nullptr; }
#endif
