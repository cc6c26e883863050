// The exported operations on pages.
#include "cache.h"

#include <string.h>

#include "runtime.h"

namespace {

const QkCacheOps* ops_of(int isa) {
    switch (isa) {
        case QK_PORTABLE: return qk_cache_portable();
        case QK_AVX2: return qk_cache_avx2();
        case QK_AVX512: return qk_cache_avx512();
        case QK_AVX512_BF16: return qk_cache_avx512();  // gains nothing from it
        default: return nullptr;
    }
}

}  // namespace

QK_EXPORT int qk_cache_store(int isa, const QkStore* call, int threads) {
    const QkCacheOps* ops = ops_of(isa);
    return ops ? ops->store(call, threads) : QK_BAD_ARGUMENT;
}
QK_EXPORT int qk_cache_gather(int isa, const QkGather* call, int threads) {
    const QkCacheOps* ops = ops_of(isa);
    return ops ? ops->gather(call, threads) : QK_BAD_ARGUMENT;
}
QK_EXPORT int qk_cache_copy(int, const QkPool* pool, int64_t page_bytes, const int64_t* source,
                            const int64_t* target, int64_t count, int threads) {
    qk_for_each(threads, count, 1, [&](int64_t i) {
        memcpy(pool->pages + target[i] * pool->stride, pool->pages + source[i] * pool->stride, size_t(page_bytes));
    });
    return QK_OK;
}
