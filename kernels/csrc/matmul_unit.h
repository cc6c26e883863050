// What the arithmetics of matmul_impl.h share: units of 128 columns and their scales.
//
// Weights are decoded by units. Each scale belongs to one or more whole runs of 32 columns, so a unit has at most
// four, and FP8 and INT4 differ only in how a unit is decoded. Plain bf16 is the same with scales of one.
#ifndef QK_MATMUL_UNIT_H
#define QK_MATMUL_UNIT_H

#include "matmul.h"
#include "simd.h"

#define QK_UNROLL _Pragma("GCC unroll 32")

namespace {

constexpr int UNIT = 128;

// FP8_ANY: block columns other than 128; its four float32 scales per unit are looked up one by one.
enum Kind { INT4_32, INT4_64, INT4_128, FP8_128, FP8_ANY, PLAIN };

constexpr bool is_int4(int kind) { return kind <= INT4_128; }
constexpr int unit_bytes(int kind) { return is_int4(kind) ? UNIT / 2 : kind == PLAIN ? 2 * UNIT : UNIT; }
constexpr int scale_bytes(int kind) {  // of a unit
    return kind == PLAIN ? 0 : kind == INT4_32 ? 8 : kind == INT4_64 ? 4 : kind == INT4_128 ? 2 : kind == FP8_128 ? 4 : 16;
}

// A row of stored weights, or one unit of it.
struct Row {
    const uint8_t* codes;
    const uint8_t* scale;
};

// The scales of a unit's four runs of 32 columns.
template <int Kind>
QK_INLINE void unit_scales(const uint8_t* scale, float* out) {
    if constexpr (Kind == PLAIN) {
        for (int i = 0; i < 4; ++i) out[i] = 1.0f;
    } else if constexpr (Kind == FP8_ANY) {
        memcpy(out, scale, 16);
    } else if constexpr (Kind == FP8_128) {
        for (int i = 0; i < 4; ++i) memcpy(out + i, scale, 4);
    } else {
        constexpr int COUNT = scale_bytes(Kind) / 2;
        uint16_t stored[COUNT];
        memcpy(stored, scale, sizeof stored);
        for (int i = 0; i < 4; ++i) {
            const uint32_t bits = uint32_t(stored[i * COUNT / 4]) << 16;
            memcpy(out + i, &bits, 4);
        }
    }
}

}  // namespace

#endif
