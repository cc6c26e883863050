// Vectors of QK_WIDTH float32 lanes through the GCC/Clang vector extension: one source for every instruction set.
//
// Results come from operations with one IEEE result (no fused multiply-add, no reciprocal, no approximate minimum),
// so all widths give the same bits. Everything is in an unnamed namespace and nothing of the standard library is
// instantiated: code compiled for AVX-512 must never be merged with, or stand in for, portable code at link time.
#ifndef QK_WIDTH
#error "define QK_WIDTH (lanes) before including"
#endif

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC's own AVX-512 header (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the packing below assumes little-endian words"
#endif

#if defined(__SANITIZE_ADDRESS__)  // checks of everything that is inlined would take minutes to compile
#define QK_INLINE inline
#define QK_LAMBDA
#else
#define QK_INLINE inline __attribute__((always_inline))
#define QK_LAMBDA __attribute__((always_inline))
#endif

namespace {

constexpr int W = QK_WIDTH;
typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint8_t vb __attribute__((vector_size(W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

template <class V, class T>
QK_INLINE V load(const T* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class V, class T>
QK_INLINE void store(T* p, V v) {
    memcpy(p, &v, sizeof v);
}
QK_INLINE vf splat(float x) { return x - vf{}; }  // x - (+0) keeps every x, -0 included
QK_INLINE vi splati(int32_t x) { return x - vi{}; }
QK_INLINE vi bits(vf x) { return (vi)x; }
QK_INLINE vf number(vi x) { return (vf)x; }
QK_INLINE vi magnitude(vf x) { return bits(x) & 0x7fffffff; }

// Operations that GCC 12 does not find in the generic form (it takes bytes apart one by one, and compares and
// blends for a minimum). a < b ? a : b is exactly the instruction's meaning; NaN never gets here. any(mask): whether a
// lane is set, all bits or none. fused: a * b + c rounded once; used where it decides no bit of a result.
#if QK_WIDTH == 16
QK_INLINE vi widen(vb x) { return (vi)_mm512_cvtepu8_epi32((__m128i)x); }
QK_INLINE vi widen(vh x) { return (vi)_mm512_cvtepu16_epi32((__m256i)x); }
QK_INLINE vb to_bytes(vi x) { return (vb)_mm512_cvtepi32_epi8((__m512i)x); }
QK_INLINE vh to_halves(vi x) { return (vh)_mm512_cvtepi32_epi16((__m512i)x); }
QK_INLINE bool any(vi mask) { return _mm512_movepi32_mask((__m512i)mask) != 0; }
QK_INLINE vi maxi(vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); }
QK_INLINE vi mini(vi a, vi b) { return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b); }
QK_INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
QK_INLINE vf maxf(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
QK_INLINE vf minf(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#elif QK_WIDTH == 8
QK_INLINE vi widen(vb x) { return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)&x)); }
QK_INLINE vi widen(vh x) { return (vi)_mm256_cvtepu16_epi32((__m128i)x); }
QK_INLINE vh to_halves(vi x) {  // x in [0, 65535]
    const __m256i packed = _mm256_packus_epi32((__m256i)x, (__m256i)x);
    return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
QK_INLINE vb to_bytes(vi x) {  // x in [0, 255]
    const __m128i halves = (__m128i)to_halves(x), bytes = _mm_packus_epi16(halves, halves);
    vb out;
    memcpy(&out, &bytes, sizeof out);
    return out;
}
QK_INLINE bool any(vi mask) { return _mm256_movemask_ps((__m256)mask) != 0; }
QK_INLINE vi maxi(vi a, vi b) { return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b); }
QK_INLINE vi mini(vi a, vi b) { return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b); }
QK_INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
QK_INLINE vf maxf(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
QK_INLINE vf minf(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#else
QK_INLINE vi widen(vb x) { return __builtin_convertvector(x, vi); }
QK_INLINE vi widen(vh x) { return __builtin_convertvector(x, vi); }
QK_INLINE vb to_bytes(vi x) { return __builtin_convertvector(x, vb); }
QK_INLINE vh to_halves(vi x) { return __builtin_convertvector(x, vh); }
QK_INLINE bool any(vi mask) {
    int32_t lanes = 0;
    for (int i = 0; i < W; ++i) lanes |= mask[i];
    return lanes != 0;
}
QK_INLINE vi maxi(vi a, vi b) { return a > b ? a : b; }
QK_INLINE vf maxf(vf a, vf b) { return a > b ? a : b; }
QK_INLINE vf minf(vf a, vf b) { return a < b ? a : b; }
#endif

// Bits of the nearest even bf16 in the low half; a NaN stays one.
QK_INLINE vi bf16_of(vf x) {
    const vi u = bits(x);
    const vi rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return (magnitude(x) > 0x7f800000 ? ((u >> 16) | 0x40) : rounded) & 0xffff;
}
QK_INLINE vf from_bf16(vi x) { return number(x << 16); }

// Folds the upper half of every segment of 2 * H lanes of a and b onto the lower: the segments of a, then of b.
#if defined(__clang__) || __GNUC__ >= 12
#define QK_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define QK_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif

struct Add {
    QK_INLINE vf operator()(vf a, vf b) const { return a + b; }
};
struct Max {
    QK_INLINE vi operator()(vi a, vi b) const { return maxi(a, b); }
};

template <int H, class Op, class V>
QK_INLINE V fold(Op op, V a, V b) {
#if QK_WIDTH == 16
    if constexpr (H == 8)
        return op(QK_SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                  QK_SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
    else if constexpr (H == 4)
        return op(QK_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                  QK_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
    else if constexpr (H == 2)
        return op(QK_SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),
                  QK_SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31));
    else
        return op(QK_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                  QK_SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
#elif QK_WIDTH == 8
    if constexpr (H == 4)
        return op(QK_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11), QK_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15));
    else if constexpr (H == 2)
        return op(QK_SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13), QK_SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15));
    else
        return op(QK_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14), QK_SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15));
#else
    if constexpr (H == 2)
        return op(QK_SHUFFLE(a, b, 0, 1, 4, 5), QK_SHUFFLE(a, b, 2, 3, 6, 7));
    else
        return op(QK_SHUFFLE(a, b, 0, 2, 4, 6), QK_SHUFFLE(a, b, 1, 3, 5, 7));
#endif
}

// Lane i of the result = the fold of leaf(i), i in [0, W). Depth first, so that log2(W) vectors are alive.
template <int N, class Op, class Leaf>
QK_INLINE auto across(Op op, const Leaf& leaf, int first) {
    if constexpr (N == 1) {
        return leaf(first);
    } else {
        const auto a = across<N / 2>(op, leaf, first);
        const auto b = across<N / 2>(op, leaf, first + N / 2);
        return fold<W / N>(op, a, b);
    }
}

// The fold of the N vectors term(k), k in [first, first + N), the upper half onto the lower until one is left.
template <int N, int Step, class Op, class Term>
QK_INLINE auto along(Op op, const Term& term, int k) {
    if constexpr (N == 1) {
        return term(k);
    } else {
        return op(along<N / 2, Step * 2>(op, term, k), along<N / 2, Step * 2>(op, term, k + Step));
    }
}

}  // namespace
