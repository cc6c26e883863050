// Vectors of e4m3 codes to and from float32, and the loop over a row of any length. Include after QK_WIDTH is set.
#ifndef QK_FORMATS_H
#define QK_FORMATS_H

#include "simd.h"

namespace {

constexpr float FP8_ZERO_SCALE = 1.0f / 8388608.0f;
constexpr int32_t INFINITE = 0x7f800000;

QK_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// e4m3 to float32, exact for every finite code and without denormal operands: those of exponent 0 are decoded with
// exponent 1 and an implicit one, which is then taken off.
QK_INLINE vf decode_e4m3(vb codes) {
    const vi c = widen(codes);
    const vi is_subnormal = (c & 0x78) == 0;
    const vi exponent = (120 << 23) + (is_subnormal & (1 << 23));
    const vf extra = number(is_subnormal & 0x3c800000);  // 2^-6
    const vf size = number(((c & 0x7f) << 20) + exponent) - extra;
    return number(bits(size) | ((c & 0x80) << 24));
}

// The same, with NaN for the codes of NaN.
QK_INLINE vf decode_e4m3_or_nan(vb codes) {
    const vi is_nan = (widen(codes) & 0x7f) == 0x7f;
    return number(bits(decode_e4m3(codes)) | (is_nan & 0x7fc00000));
}

// Nearest even e4m3, saturating; the sign of zero is kept.
QK_INLINE vi encode_e4m3(vf x) {
    const vf size = minf(number(magnitude(x)), splat(448.0f));
    const vi u = bits(size);
    const vi normal = ((u + 0x7ffff + ((u >> 20) & 1)) >> 20) - (120 << 3);
    const vi subnormal = bits(size + 16384.0f) & 15;  // 2^14 has steps of 2^-9, those of e4m3's subnormals
    return (size < splat(0.015625f) ? subnormal : normal) | ((bits(x) >> 24) & 0x80);
}

// Calls step(i, lanes) for every vector of [0, n): lanes is W but for the last.
template <class Step>
QK_INLINE void vectors(int64_t n, const Step& step) {
    int64_t i = 0;
    for (; i + W <= n; i += W) step(i, W);
    if (i < n) step(i, int(n - i));
}
template <class V, class T>
QK_INLINE V load_some(const T* p, int lanes) {
    if (lanes == W) return load<V>(p);
    V v{};
    memcpy(&v, p, size_t(lanes) * sizeof *p);
    return v;
}
template <class V, class T>
QK_INLINE void store_some(T* p, V v, int lanes) {
    memcpy(p, &v, size_t(lanes) * sizeof *p);
}

}  // namespace

#endif
