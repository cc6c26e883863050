// Eight entries at a time: the pool's tags are gathered, under the mask of the pages that may be read.
#include "tags.h"

#if defined(__AVX512F__) && defined(__AVX512VL__)
#include <immintrin.h>

namespace {

bool match(const QkTags& call, int64_t r, int64_t n) {
    const int32_t* table = call.table + r * call.table_stride;
    const int32_t* pages = call.pages + r * call.pages_stride;
    const uint64_t* tags = call.tags + r * call.tags_stride;
    const int64_t most = call.num_pages < INT32_MAX ? call.num_pages : int64_t(INT32_MAX) + 1;
    const __m256i last = _mm256_set1_epi32(int32_t(most - 1));
    if (most == 0) return n == 0;
    for (int64_t i = 0; i < n; i += 8) {
        const __mmask8 used = n - i >= 8 ? __mmask8(0xff) : __mmask8((1u << (n - i)) - 1);
        const __m256i page = _mm256_maskz_loadu_epi32(used, table + i);
        const __m256i expected = _mm256_maskz_loadu_epi32(used, pages + i);
        __mmask8 good = _mm256_mask_cmple_epu32_mask(used, page, last);  // unsigned: negative ones are large
        good = _mm256_mask_cmpeq_epi32_mask(good, page, expected);
        const __m512i tag = _mm512_mask_i32gather_epi64(_mm512_setzero_si512(), good, page, call.pool, 8);
        const __m512i wanted = _mm512_maskz_loadu_epi64(used, tags + i);
        if (_mm512_mask_cmpeq_epi64_mask(good, tag, wanted) != used) return false;
    }
    return true;
}

}  // namespace

extern "C" QkTagsMatch qk_tags_match_avx512() { return match; }
#else
extern "C" QkTagsMatch qk_tags_match_avx512() { return nullptr; }
#endif
