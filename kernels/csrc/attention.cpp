// The exported attention and indexer.
#include "attention.h"

#include <stdlib.h>

#include "runtime.h"

namespace {

const QkAttentionOps* ops_of(int isa) {
    switch (isa) {
        case QK_PORTABLE: return qk_attention_portable();
        case QK_AVX2: return qk_attention_avx2();
        case QK_AVX512: return qk_attention_avx512();
        case QK_AVX512_BF16: return qk_attention_avx512_bf16();
        default: return nullptr;
    }
}

// Order of ranks as unsigned numbers: NaN highest, -0 equal to +0.
uint32_t rank_of(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0xffffffffu;
    if (magnitude == 0) return 0x80000000u;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The positions of the k largest of n ranks, ascending, of equals the lower; k < n. `rank` is n of scratch.
void select(const float* scores, int64_t n, int64_t k, uint32_t* rank, int32_t* out) {
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits;
        __builtin_memcpy(&bits, scores + i, 4);
        rank[i] = rank_of(bits);
    }
    uint32_t prefix = 0;  // of the k-th largest, found from the top byte down
    int64_t left = k;     // how many are still to be found among those with this prefix
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t counts[256] = {};
        const uint64_t above = uint64_t(prefix) >> (shift + 8);
        for (int64_t i = 0; i < n; ++i)
            if (uint64_t(rank[i]) >> (shift + 8) == above) ++counts[rank[i] >> shift & 255];
        int digit = 255;
        for (; counts[digit] < left; --digit) left -= counts[digit];
        prefix |= uint32_t(digit) << shift;
    }
    for (int64_t i = 0; i < n && k; ++i) {
        const bool is_equal = rank[i] == prefix;
        if (rank[i] < prefix || (is_equal && !left)) continue;
        left -= is_equal, --k;
        *out++ = int32_t(i);
    }
}

}  // namespace

QK_EXPORT int qk_attention(int isa, const QkAttention* call, int threads) {
    const QkAttentionOps* ops = ops_of(isa);
    return ops ? ops->attention(call, threads) : QK_BAD_ARGUMENT;
}
QK_EXPORT int qk_index_scores(int isa, const QkIndexScores* call, int threads) {
    const QkAttentionOps* ops = ops_of(isa);
    return ops ? ops->index_scores(call, threads) : QK_BAD_ARGUMENT;
}

QK_EXPORT int qk_index_topk(int, const QkIndexTopk* call, int threads) {
    const int64_t k = call->k;
    uint32_t* ranks = static_cast<uint32_t*>(malloc(size_t(call->tokens * call->longest + 1) * 4));
    if (!ranks) return QK_NO_MEMORY;
    qk_for_each(threads, call->tokens, 1, [&](int64_t t) {
        const int64_t n = call->lengths[t];
        int32_t* to = call->out + t * k;
        if (n > k) {
            select(call->scores + t * call->stride, n, k, ranks + t * call->longest, to);
            return;
        }
        for (int64_t i = 0; i < k; ++i) to[i] = i < n ? int32_t(i) : -1;
    });
    free(ranks);
    return QK_OK;
}
