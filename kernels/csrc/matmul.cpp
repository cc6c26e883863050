// The exported linears and experts: pick the instruction set, sort tokens by expert, bound the scratch memory.
#include "matmul.h"

#include <stdlib.h>

namespace {

constexpr int64_t SCRATCH_BYTES = 96 << 20;  // tokens are taken in chunks whose activations fit

const QkMatmulOps* ops_of(int isa) {
    switch (isa) {
        case QK_PORTABLE: return qk_matmul_portable();
        case QK_AVX2: return qk_matmul_avx2();
        case QK_AVX512: return qk_matmul_avx512();
        case QK_AVX512_BF16: return qk_matmul_avx512_bf16();
        default: return nullptr;
    }
}

int64_t expert_of(const QkExperts& call, int64_t pair) {
    const int64_t at = pair / call.top * call.ids_stride + pair % call.top * call.ids_step;
    return call.has_wide_ids ? static_cast<const int64_t*>(call.ids)[at] : static_cast<const int32_t*>(call.ids)[at];
}

// Counting sort of the pairs of call.ids; `space` holds 3 * experts + 1 + tokens * top numbers.
int route(const QkExperts& call, int32_t* space, QkRouting* routing) {
    const int64_t pairs = call.tokens * call.top;
    int32_t* next = space;
    int32_t* expert = next + call.experts;
    int32_t* first = expert + call.experts;
    int32_t* sorted = first + call.experts + 1;
    for (int64_t e = 0; e < call.experts; ++e) next[e] = 0;
    for (int64_t p = 0; p < pairs; ++p) {
        const int64_t e = expert_of(call, p);
        if (e < -1 || e >= call.experts) return QK_BAD_ID;
        if (e >= 0) ++next[e];
    }
    int64_t active = 0;
    int32_t start = 0;
    for (int64_t e = 0; e < call.experts; ++e) {
        const int32_t count = next[e];
        next[e] = start;
        if (count) expert[active] = int32_t(e), first[active++] = start;
        start += count;
    }
    first[active] = start;
    for (int64_t p = 0; p < pairs; ++p) {
        const int64_t e = expert_of(call, p);
        if (e >= 0) sorted[next[e]++] = int32_t(p);
    }
    *routing = QkRouting{active, expert, first, sorted};
    return QK_OK;
}

}  // namespace

QK_EXPORT int qk_linear(int isa, const QkLinear* call, int threads) {
    const QkMatmulOps* ops = ops_of(isa);
    return ops ? ops->linear(call, threads) : QK_BAD_ARGUMENT;
}

QK_EXPORT int qk_experts(int isa, const QkExperts* call, int threads) {
    const QkMatmulOps* ops = ops_of(isa);
    if (!ops) return QK_BAD_ARGUMENT;
    const int64_t token_bytes = 4 * (call->hidden + call->top * (call->inner + 128));
    const int64_t fitting = SCRATCH_BYTES / token_bytes, step = fitting < 128 ? 128 : fitting;
    const int64_t most = call->tokens < step ? call->tokens : step;
    const int64_t numbers = 3 * call->experts + 1 + most * call->top;
    int32_t* space = static_cast<int32_t*>(malloc(size_t(numbers) * sizeof(int32_t)));
    if (!space) return QK_NO_MEMORY;
    int status = QK_OK;
    for (int64_t start = 0; start < call->tokens && status == QK_OK; start += step) {
        QkExperts part = *call;
        part.tokens = call->tokens - start < step ? call->tokens - start : step;
        part.x += start * call->x_stride;
        const int64_t id_bytes = call->has_wide_ids ? 8 : 4;
        part.ids = static_cast<const char*>(call->ids) + start * call->ids_stride * id_bytes;
        part.weights += start * call->weights_stride;
        part.out += start * call->hidden;
        QkRouting routing;
        status = route(part, space, &routing);
        if (status == QK_OK) status = ops->experts(&part, &routing, threads);
    }
    free(space);
    return status;
}

QK_EXPORT int qk_plain_linear(int isa, const QkPlainLinear* call, int threads) {
    const QkMatmulOps* ops = ops_of(isa);
    return ops ? ops->plain(call, threads) : QK_BAD_ARGUMENT;
}
