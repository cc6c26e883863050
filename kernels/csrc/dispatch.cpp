// The exported functions: pick the instruction set the caller names, in a known floating-point environment.
//
// The caller names it on every call (quantkit_kernels/native.py decides once), so the library has no state and a
// test can run every level in one process.
#include "attention.h"
#include "cache.h"
#include "environment.h"
#include "matmul.h"
#include "quantkit_kernels.h"
#include "rows.h"

namespace {

bool processor_has(int isa) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    if (isa == QK_AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (isa == QK_AVX512) return has_avx512;
    if (isa == QK_AVX512_BF16)
        return has_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
               __builtin_cpu_supports("avx512vnni");
#endif
    return isa == QK_PORTABLE;
}

const QkOps* ops_of(int isa) {
    switch (isa) {
        case QK_PORTABLE: return qk_ops_portable();
        case QK_AVX2: return qk_ops_avx2();
        case QK_AVX512: return qk_ops_avx512();
        case QK_AVX512_BF16: return qk_ops_avx512();  // conversions gain nothing from it
        default: return nullptr;
    }
}

// Whether this build holds every operation for an instruction set: a compiler that doesn't know one of its flags leaves
// out some sources only (setup.py).
bool is_built(int isa) {
    switch (isa) {
        case QK_PORTABLE: return true;
        case QK_AVX2:
            return qk_ops_avx2() && qk_cache_avx2() && qk_matmul_avx2() && qk_attention_avx2() && qk_rows_avx2();
        case QK_AVX512:
            return qk_ops_avx512() && qk_cache_avx512() && qk_matmul_avx512() && qk_attention_avx512() &&
                   qk_rows_avx512();
        case QK_AVX512_BF16: return is_built(QK_AVX512) && qk_matmul_avx512_bf16() && qk_attention_avx512_bf16();
        default: return false;
    }
}

template <class Call>
int with(int isa, const Call& call) {
    const QkOps* ops = ops_of(isa);
    if (!ops) return QK_BAD_ARGUMENT;
    FloatEnvironment environment;
    return call(*ops);
}

}  // namespace

// Raised whenever a signature or struct of any of the headers with a C ABI changes.
QK_EXPORT int qk_abi_version() { return 5; }

// 1: built in and supported here. 0: not supported by this processor. -1: not in this build.
QK_EXPORT int qk_isa_state(int isa) { return !is_built(isa) ? -1 : processor_has(isa); }

QK_EXPORT int qk_fp8_to_float32(int isa, const QkFp8* w, float* out, int64_t* where) {
    return with(isa, [&](const QkOps& ops) { return ops.fp8_to_float32(w, out, where); });
}
QK_EXPORT int qk_fp8_to_bf16(int isa, const QkFp8* w, uint16_t* out, int64_t* where) {
    return with(isa, [&](const QkOps& ops) { return ops.fp8_to_bf16(w, out, where); });
}
QK_EXPORT int qk_fp8_to_int4(int isa, const QkFp8* w, const QkInt4Out* out, int64_t* where) {
    return with(isa, [&](const QkOps& ops) { return ops.fp8_to_int4(w, out, where); });
}
QK_EXPORT int qk_plain_to_int4(int isa, const QkPlain* w, const QkInt4Out* out, int64_t* where) {
    return with(isa, [&](const QkOps& ops) { return ops.plain_to_int4(w, out, where); });
}
QK_EXPORT int qk_int4_to_float32(int isa, const QkInt4* w, float* out) {
    return with(isa, [&](const QkOps& ops) { return ops.int4_to_float32(w, out); });
}
QK_EXPORT int qk_int4_to_bf16(int isa, const QkInt4* w, uint16_t* out) {
    return with(isa, [&](const QkOps& ops) { return ops.int4_to_bf16(w, out); });
}
QK_EXPORT int qk_plain_to_fp8(int isa, const QkPlain* w, int64_t block_rows, int64_t block_columns, uint8_t* codes,
                              float* scales, int64_t* where) {
    return with(isa, [&](const QkOps& ops) {
        return ops.plain_to_fp8(w, block_rows, block_columns, codes, scales, where);
    });
}
QK_EXPORT int qk_bf16_to_float32(int isa, const uint16_t* in, int64_t count, float* out) {
    return with(isa, [&](const QkOps& ops) { return ops.bf16_to_float32(in, count, out); });
}
QK_EXPORT int qk_float32_to_bf16(int isa, const float* in, int64_t count, uint16_t* out) {
    return with(isa, [&](const QkOps& ops) { return ops.float32_to_bf16(in, count, out); });
}
