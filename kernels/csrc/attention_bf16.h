// Arithmetic of attention_impl.h with AVX-512 BF16 products (vdpbf16ps): e4m3 codes are exact in bf16.
#include "attention_tile.h"

namespace {

struct CodeTables {  // high and low byte of the bf16 of a code without its sign
    uint8_t high[128], low[128];
};
constexpr uint16_t bf16_of_code(int code) {
    if (code == 0x7f) return 0x7fc0;
    if (code >= 8) return uint16_t((code << 4) + (120 << 7));
    if (code == 0) return 0;
    const int exponent = code >= 4 ? 2 : code >= 2 ? 1 : 0;  // code * 2^-9
    return uint16_t((127 - 9 + exponent) << 7 | ((code << (7 - exponent)) & 0x7f));
}
constexpr CodeTables make_code_tables() {
    CodeTables t{};
    for (int i = 0; i < 128; ++i) t.high[i] = uint8_t(bf16_of_code(i) >> 8), t.low[i] = uint8_t(bf16_of_code(i));
    return t;
}
alignas(64) constexpr CodeTables CODES = make_code_tables();

struct Arithmetic {
    typedef uint16_t Element;
    static constexpr int PACK = 2;  // elements of one column (keys) or token (values) in a lane
    static constexpr int RUN = 6;   // rows whose sums are in registers, with four vectors each

    static QK_INLINE __m512 dot(__m512 sum, __m512i a, __m512i b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    }
    static QK_INLINE __m512i pair(const uint16_t* p) {
        int32_t both;
        memcpy(&both, p, 4);
        return _mm512_set1_epi32(both);
    }

    // Writes zeros up to the next multiple of 64.
    static QK_INLINE void decode(const uint8_t* codes, int64_t n, uint16_t* out) {
        const __m512i high0 = _mm512_load_si512(CODES.high), high1 = _mm512_load_si512(CODES.high + 64);
        const __m512i low0 = _mm512_load_si512(CODES.low), low1 = _mm512_load_si512(CODES.low + 64);
        const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // so that unpacking restores it
        for (int64_t i = 0; i < n; i += 64) {
            const __m512i loaded = n - i >= 64 ? _mm512_loadu_si512(codes + i)
                                               : _mm512_maskz_loadu_epi8((__mmask64(1) << (n - i)) - 1, codes + i);
            const __m512i c = _mm512_permutexvar_epi64(order, loaded);
            const __m512i sign = _mm512_and_si512(c, _mm512_set1_epi8(int8_t(0x80)));
            const __m512i high = _mm512_or_si512(_mm512_permutex2var_epi8(high0, c, high1), sign);
            const __m512i low = _mm512_permutex2var_epi8(low0, c, low1);
            _mm512_storeu_si512(out + i, _mm512_unpacklo_epi8(low, high));
            _mm512_storeu_si512(out + i + 32, _mm512_unpackhi_epi8(low, high));
        }
    }
    // Writes zeros up to the next multiple of 32.
    static void copy(const uint8_t* bf16, int64_t n, uint16_t* out) {
        int64_t i = 0;
        for (; i + 32 <= n; i += 32) _mm512_storeu_si512(out + i, _mm512_loadu_si512(bf16 + 2 * i));
        if (i == n) return;
        const __mmask32 used = (__mmask32(1) << (n - i)) - 1;
        _mm512_storeu_si512(out + i, _mm512_maskz_loadu_epi16(used, bf16 + 2 * i));
    }
    static QK_INLINE void put(uint16_t* to, vf x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x));
    }
    static bool is_finite(const uint16_t* x, int64_t n) {
        const __m512i infinite = _mm512_set1_epi16(0x7f80);
        __mmask32 found = 0;
        for (int64_t i = 0; i + 32 <= n; i += 32)
            found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(x + i), infinite), infinite);
        return !found;
    }

    // Pairs of columns of 16 tokens: 16 x 16 lanes at a time.
    static void transpose(const uint16_t* rows, int64_t stride, int64_t columns, uint16_t* keys) {
        for (int64_t c = 0; c < columns; c += 32) {
            __m512i a[16], b[16];
            for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows + i * stride + c);
            for (int i = 0; i < 16; i += 2) {
                b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
                b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
            }
            for (int i = 0; i < 16; i += 4)
                for (int j = 0; j < 2; ++j) {
                    a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + 2 + j]);
                    a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + 2 + j]);
                }
            for (int i = 0; i < 16; i += 8)  // a[i + k]: columns k, k + 4, k + 8, k + 12 of rows i..i+3, and so on
                for (int k = 0; k < 4; ++k) {
                    b[i + k] = _mm512_shuffle_i32x4(a[i + k], a[i + 4 + k], 0x88);
                    b[i + 4 + k] = _mm512_shuffle_i32x4(a[i + k], a[i + 4 + k], 0xdd);
                }
            for (int k = 0; k < 4; ++k) {
                a[k] = _mm512_shuffle_i32x4(b[k], b[8 + k], 0x88);
                a[8 + k] = _mm512_shuffle_i32x4(b[k], b[8 + k], 0xdd);
                a[4 + k] = _mm512_shuffle_i32x4(b[4 + k], b[12 + k], 0x88);
                a[12 + k] = _mm512_shuffle_i32x4(b[4 + k], b[12 + k], 0xdd);
            }
            for (int i = 0; i < 16; ++i) _mm512_storeu_si512(keys + (c / 2 + i) * TILE * PACK, a[i]);
        }
    }
    // Two tokens of a column side by side.
    static void interleave(const uint16_t* rows, int64_t stride, int64_t columns, uint16_t* values) {
        __m512i first, second;
        {
            uint16_t index[64];
            for (int i = 0; i < 64; ++i) index[i] = uint16_t(i / 2 + i % 2 * 32);
            first = _mm512_loadu_si512(index), second = _mm512_loadu_si512(index + 32);
        }
        for (int t = 0; t < GROUP; t += 2)
            for (int64_t c = 0; c < columns; c += 32) {
                const __m512i a = _mm512_loadu_si512(rows + t * stride + c);
                const __m512i b = _mm512_loadu_si512(rows + (t + 1) * stride + c);
                uint16_t* to = values + t * columns + c * PACK;
                _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, first, b));
                _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(a, second, b));
            }
    }

    // s = (is_first ? 0 : s) + scale * (q k) for R rows and all tokens of the tile; a step is two columns.
    template <int R>
    static void scores(const uint16_t* q, int64_t stride, const uint16_t* keys, int64_t steps, const float* scale,
                       float* s, bool is_first) {
        __m512 sum[R][4];
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < 4; ++i) sum[r][i] = _mm512_setzero_ps();
        for (int64_t c = 0; c < steps; ++c) {
            __m512i k[4];
            for (int i = 0; i < 4; ++i) k[i] = _mm512_loadu_si512(keys + (c * TILE + i * 16) * PACK);
            for (int r = 0; r < R; ++r) {
                const __m512i x = pair(q + r * stride + 2 * c);
                for (int i = 0; i < 4; ++i) sum[r][i] = dot(sum[r][i], x, k[i]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < 4; ++i) {
                float* to = s + r * TILE + i * 16;
                const __m512 before = is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(to);
                _mm512_storeu_ps(to, _mm512_fmadd_ps(sum[r][i], _mm512_loadu_ps(scale + i * 16), before));
            }
    }

    // sums = sums * factor + p v for R rows and 64 columns; a step is two tokens.
    template <int R>
    static void weigh(const uint16_t* p, int64_t stride, const uint16_t* values, int64_t width, int64_t,
                      int64_t steps, const float* factor, float* sums) {
        __m512 sum[R][4];
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < 4; ++i)
                sum[r][i] = _mm512_mul_ps(_mm512_loadu_ps(sums + r * width + i * 16), _mm512_set1_ps(factor[r]));
        for (int64_t t = 0; t < steps; ++t) {
            __m512i v[4];
            for (int i = 0; i < 4; ++i) v[i] = _mm512_loadu_si512(values + (t * width + i * 16) * PACK);
            for (int r = 0; r < R; ++r) {
                const __m512i x = pair(p + r * stride + 2 * t);
                for (int i = 0; i < 4; ++i) sum[r][i] = dot(sum[r][i], x, v[i]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < 4; ++i) _mm512_storeu_ps(sums + r * width + i * 16, sum[r][i]);
    }
};

}  // namespace

#include "attention_impl.h"
