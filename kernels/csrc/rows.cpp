// The exported norms and rotations.
#include "rows.h"

namespace {

const QkRowOps* ops_of(int isa) {
    switch (isa) {
        case QK_PORTABLE: return qk_rows_portable();
        case QK_AVX2: return qk_rows_avx2();
        case QK_AVX512: return qk_rows_avx512();
        case QK_AVX512_BF16: return qk_rows_avx512();  // gains nothing from it
        default: return nullptr;
    }
}

}  // namespace

QK_EXPORT int qk_rms_norm(int isa, const QkNorm* call, int threads) {
    const QkRowOps* ops = ops_of(isa);
    if (!ops) return QK_BAD_ARGUMENT;
    ops->norm(call, threads);
    return QK_OK;
}
QK_EXPORT int qk_add(int isa, const QkAdd* call, int threads) {
    const QkRowOps* ops = ops_of(isa);
    if (!ops) return QK_BAD_ARGUMENT;
    ops->add(call, threads);
    return QK_OK;
}
QK_EXPORT int qk_rotate(int isa, const QkRotate* call, int threads) {
    const QkRowOps* ops = ops_of(isa);
    if (!ops) return QK_BAD_ARGUMENT;
    ops->rotate(call, threads);
    return QK_OK;
}
