// Arithmetic of matmul_impl.h with AVX-512 BF16 products (vdpbf16ps) and table decodes.
//
// A unit of 128 columns is four steps of 32 bf16; float lane l sums columns of the run of 32 that l / 4 names.
// INT4: 16-bit lane j of the packed words holds columns 4 j + t, t = 0..3, and vpermw looks at the low five bits of
// its index, so a table of two equal halves decodes a nibble without masking. FP8: high and low byte of the bf16
// come from two tables of 128 by code without sign, exact for every code.
#include "matmul_unit.h"

namespace {

struct Bf16Tables {
    uint16_t nibble[32];
    uint16_t every_fourth[32];  // 4 * (lane % 16)
    uint8_t high[128], low[128];
};

constexpr uint16_t bf16_of_small(int value) {  // |value| <= 8
    const int size = value < 0 ? -value : value;
    if (size == 0) return 0;
    const int exponent = size >= 8 ? 3 : size >= 4 ? 2 : size >= 2 ? 1 : 0;
    return uint16_t((value < 0 ? 0x8000 : 0) | (127 + exponent) << 7 | ((size << (7 - exponent)) & 0x7f));
}

constexpr uint16_t bf16_of_e4m3(int code) {  // without sign
    if (code == 0x7f) return 0x7fc0;
    if (code == 0) return 0;
    if (code >= 8) return uint16_t((code << 4) + (120 << 7));
    const int exponent = code >= 4 ? 2 : code >= 2 ? 1 : 0;  // code * 2^-9
    return uint16_t((127 - 9 + exponent) << 7 | ((code << (7 - exponent)) & 0x7f));
}

constexpr Bf16Tables make_tables() {
    Bf16Tables t{};
    for (int i = 0; i < 32; ++i) t.nibble[i] = bf16_of_small(i % 16 - 8), t.every_fourth[i] = uint16_t(i % 16 * 4);
    for (int i = 0; i < 128; ++i) {
        t.high[i] = uint8_t(bf16_of_e4m3(i) >> 8);
        t.low[i] = uint8_t(bf16_of_e4m3(i));
    }
    return t;
}

alignas(64) constexpr Bf16Tables TABLES = make_tables();

// Where the bf16 scale of run g of row n goes: the high half of float lane 4 g + n.
struct ScaleShuffle {
    uint16_t index[32];
};
constexpr ScaleShuffle scale_shuffle(int count) {  // scales in a unit
    ScaleShuffle s{};
    for (int lane = 0; lane < 16; ++lane) s.index[2 * lane + 1] = uint16_t(lane % 4 * count + lane / 4 * count / 4);
    return s;
}
template <int Count>
struct ScaleIndex {
    alignas(64) static constexpr ScaleShuffle value = scale_shuffle(Count);
};

struct Arithmetic {
    typedef uint16_t Act;
    typedef __m512 Total;
    typedef __m512i Weight;
    typedef __m512i Input;
    static constexpr int STEPS = 4, SPANS = 1, ROWS = 4;

    static QK_INLINE __m512 zero() { return _mm512_setzero_ps(); }
    static QK_INLINE __m512i input(const uint16_t* x) { return _mm512_loadu_si512(x); }
    static QK_INLINE __m512 dot(__m512 sum, __m512i w, __m512i x) {
        return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
    }
    static QK_INLINE __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
    // A value that is used several times is to be loaded once.
    template <class V>
    static QK_INLINE void keep(V& v) {
        __asm__("" : "+v"(v));
    }
    // Lane 4 g + n: the sum of lanes 4 g to 4 g + 3 of vector n.
    static QK_INLINE __m512 fold4(const __m512 (&v)[4]) { return pairs(pairs(v[0], v[1]), pairs(v[2], v[3])); }
    static QK_INLINE void finish(__m512 v, float* out) {
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
    }

    // Unit of n <= 128 activations, zeros after them.
    template <int Kind>
    static void arrange(const uint16_t* x, int n, uint16_t* out) {
        uint16_t whole[UNIT];
        if (n < UNIT) {
            memset(whole, 0, sizeof whole);
            memcpy(whole, x, size_t(n) * 2);
            x = whole;
        }
        if constexpr (Kind == PLAIN) {
            memcpy(out, x, 2 * UNIT);
        } else if constexpr (is_int4(Kind)) {  // step t, lane j: column 4 j + t
            const __m512i a = input(x), b = input(x + 32), c = input(x + 64), d = input(x + 96);
            const __m512i every_fourth = _mm512_load_si512(TABLES.every_fourth);
            QK_UNROLL
            for (int t = 0; t < 4; ++t) {
                const __m512i index = _mm512_add_epi16(every_fourth, _mm512_set1_epi16(short(t)));
                const __m512i low = _mm512_permutex2var_epi16(a, index, b);
                const __m512i high = _mm512_permutex2var_epi16(c, index, d);
                _mm512_storeu_si512(out + 32 * t, _mm512_mask_blend_epi16(0xffff0000u, low, high));
            }
        } else {  // step t, lane 8 k + i: column 32 k + 8 t + i
            for (int t = 0; t < 4; ++t)
                for (int k = 0; k < 4; ++k) memcpy(out + 32 * t + 8 * k, x + 32 * k + 8 * t, 16);
        }
    }

    template <int Kind>
    static QK_INLINE void decode(const uint8_t* codes, __m512i* w) {
        if constexpr (Kind == PLAIN) {
            QK_UNROLL
            for (int t = 0; t < 4; ++t) w[t] = _mm512_loadu_si512(codes + 64 * t);
        } else if constexpr (is_int4(Kind)) {
            const __m512i table = _mm512_load_si512(TABLES.nibble);
            __m512i words = _mm512_loadu_si512(codes);
            keep(words);
            w[0] = _mm512_permutexvar_epi16(words, table);
            w[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
            w[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table);
            w[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table);
        } else {
            const __m512i a = _mm512_loadu_si512(codes), b = _mm512_loadu_si512(codes + 64);
            bytes(_mm512_shuffle_i64x2(a, b, 0x88), w);  // 16 columns of each run of 32
            bytes(_mm512_shuffle_i64x2(a, b, 0xdd), w + 2);
        }
    }

    // Lane 4 g + n: the scale of run g of row n.
    template <int Kind>
    static QK_INLINE void scales(const Row* units, __m512* out) {
        if constexpr (Kind == PLAIN) {
            out[0] = _mm512_set1_ps(1.0f);
        } else if constexpr (Kind == FP8_128) {
            out[0] = _mm512_broadcast_f32x4(_mm_setr_ps(number(units[0]), number(units[1]), number(units[2]),
                                                        number(units[3])));
        } else if constexpr (Kind == FP8_ANY) {
            __m512 rows = _mm512_setzero_ps();
            rows = _mm512_insertf32x4(rows, _mm_loadu_ps(reinterpret_cast<const float*>(units[0].scale)), 0);
            rows = _mm512_insertf32x4(rows, _mm_loadu_ps(reinterpret_cast<const float*>(units[1].scale)), 1);
            rows = _mm512_insertf32x4(rows, _mm_loadu_ps(reinterpret_cast<const float*>(units[2].scale)), 2);
            rows = _mm512_insertf32x4(rows, _mm_loadu_ps(reinterpret_cast<const float*>(units[3].scale)), 3);
            out[0] = _mm512_permutexvar_ps(
                _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), rows);
        } else if constexpr (Kind == INT4_128) {  // the high half of lane n of four
            uint16_t stored[4];
            for (int n = 0; n < 4; ++n) memcpy(stored + n, units[n].scale, 2);
            const int64_t low = int64_t(uint64_t(stored[0]) << 16 | uint64_t(stored[1]) << 48);
            const int64_t high = int64_t(uint64_t(stored[2]) << 16 | uint64_t(stored[3]) << 48);
            out[0] = _mm512_castsi512_ps(_mm512_broadcast_i32x4(_mm_set_epi64x(high, low)));
        } else {
            constexpr int COUNT = scale_bytes(Kind) / 2;
            __m512i rows;
            if constexpr (Kind == INT4_32) {
                int64_t stored[4];
                for (int n = 0; n < 4; ++n) memcpy(stored + n, units[n].scale, 8);
                rows = _mm512_castsi256_si512(_mm256_setr_epi64x(stored[0], stored[1], stored[2], stored[3]));
            } else {
                int32_t stored[4];
                for (int n = 0; n < 4; ++n) memcpy(stored + n, units[n].scale, 4);
                rows = _mm512_castsi128_si512(_mm_setr_epi32(stored[0], stored[1], stored[2], stored[3]));
            }
            out[0] = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(
                0xaaaaaaaau, _mm512_load_si512(ScaleIndex<COUNT>::value.index), rows));
        }
    }

    static QK_INLINE void prefetch(const uint8_t* p) {
        _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
    }

private:
    static QK_INLINE void bytes(__m512i codes, __m512i* w) {
        const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(TABLES.low), codes,
                                                     _mm512_load_si512(TABLES.low + 64));
        const __m512i size = _mm512_permutex2var_epi8(_mm512_load_si512(TABLES.high), codes,
                                                      _mm512_load_si512(TABLES.high + 64));
        const __m512i high = _mm512_ternarylogic_epi32(size, codes, _mm512_set1_epi8(char(0x80)), 0xf8);  // a | b & c
        w[0] = _mm512_unpacklo_epi8(low, high);
        w[1] = _mm512_unpackhi_epi8(low, high);
    }

    static QK_INLINE float number(const Row& unit) {
        float value;
        memcpy(&value, unit.scale, 4);
        return value;
    }
    static QK_INLINE __m512 pairs(__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
    }
};

}  // namespace

#include "matmul_impl.h"
