// Rows of stored weights to and from float32: e4m3, bf16, packed INT4. Part of convert_impl.h.
#include "formats.h"
#include "quantkit_kernels.h"

namespace {

constexpr int CHUNK = 2048;           // columns; a multiple of W * 128
constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest even integer
constexpr float INT4_ZERO_SCALE = 0.0078125f;

// Calls segment(start, length, index) for the parts of columns [column, column + n) that lie in one block.
template <class Segment>
QK_INLINE void segments(int64_t column, int64_t n, int64_t block, const Segment& segment) {
    int64_t index = column / block, start = 0;
    while (start < n) {
        const int64_t length = smaller((index + 1) * block - column - start, n - start);
        segment(start, length, index++);
        start += length;
    }
}

bool has_nan_code(const uint8_t* codes, int64_t n) {
    uint8_t found = 0;
    for (int64_t i = 0; i < n; ++i) found |= uint8_t((codes[i] & 0x7f) == 0x7f);
    return found != 0;
}

int first_bad(const uint8_t* codes, const float* values, int64_t n, int64_t row, int64_t column, int64_t* where) {
    for (int64_t i = 0; i < n; ++i) {
        int32_t u;
        memcpy(&u, values + i, 4);
        const bool is_nan_code = codes && (codes[i] & 0x7f) == 0x7f;
        if (!is_nan_code && (u & 0x7fffffff) < INFINITE) continue;
        where[0] = row, where[1] = column + i;
        return is_nan_code ? QK_NAN_CODE : QK_NON_FINITE;
    }
    return QK_OK;
}

// out = e4m3 codes * scale, for as many of n as there are whole steps; returns how many.
#if QK_WIDTH == 16
// A code's bits, moved to where float16 has its, are its value times 2^-8, subnormals included, and the instruction
// that widens float16 knows those. 2^8 goes to the scale, exactly if that stays finite.
QK_INLINE int64_t decode_scaled(const uint8_t* codes, float scale, int64_t n, float* out) {
    if (!(scale < 0x1p119f && scale > -0x1p119f)) return 0;
    const __m512 by = _mm512_set1_ps(scale * 256.0f);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m512i c = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(codes + i)));
        const __m512i half = _mm512_and_si512(_mm512_slli_epi16(c, 7), _mm512_set1_epi16(int16_t(0xbfff)));
        const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
        const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
        _mm512_storeu_ps(out + i, _mm512_mul_ps(low, by));
        _mm512_storeu_ps(out + i + 16, _mm512_mul_ps(high, by));
    }
    return i;
}
#else
QK_INLINE int64_t decode_scaled(const uint8_t*, float, int64_t, float*) { return 0; }
#endif

void fp8_read(const QkFp8& w, int64_t row, int64_t column, int64_t n, float* out) {
    const uint8_t* codes = w.codes + row * w.stride + column;
    const float* scales = w.scales + (w.row_offset + row) / w.block_rows * w.scale_stride;
    segments(column, n, w.block_columns, [&](int64_t start, int64_t length, int64_t index) QK_LAMBDA {
        const vf scale = splat(scales[index]);
        const int64_t done = decode_scaled(codes + start, scales[index], length, out + start);
        vectors(length - done, [&](int64_t i, int lanes) QK_LAMBDA {
            const vf x = decode_e4m3(load_some<vb>(codes + start + done + i, lanes)) * scale;
            store_some(out + start + done + i, x, lanes);
        });
    });
}

void widen_bf16(const uint16_t* in, int64_t n, float* out) {
    vectors(n, [&](int64_t i, int lanes) QK_LAMBDA {
        store_some(out + i, from_bf16(widen(load_some<vh>(in + i, lanes))), lanes);
    });
}

void narrow_bf16(const float* in, int64_t n, uint16_t* out) {
    vectors(n, [&](int64_t i, int lanes) QK_LAMBDA {
        store_some(out + i, to_halves(bf16_of(load_some<vf>(in + i, lanes))), lanes);
    });
}

void plain_read(const QkPlain& w, int64_t row, int64_t column, int64_t n, float* out) {
    const int64_t at = row * w.stride + column;
    if (w.is_bf16)
        widen_bf16(static_cast<const uint16_t*>(w.data) + at, n, out);
    else
        memcpy(out, static_cast<const float*>(w.data) + at, size_t(n) * 4);
}

// Eight nibbles, one in a byte, to a word, and back.
QK_INLINE uint32_t pack8(uint64_t x) {
    x = (x | x >> 4) & 0x00ff00ff00ff00ffu;
    x = (x | x >> 8) & 0x0000ffff0000ffffu;
    return uint32_t(x | x >> 16);
}
// Codes of n weights (a multiple of 32), each in the low four bits of a byte, to words of nibbles code + 8.
QK_INLINE void pack_codes(const uint8_t* codes, int64_t n, uint32_t* words) {
#if QK_WIDTH == 16
    for (int64_t i = 0; i < n; i += 32) {
        const __m256i four = _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(codes + i)), _mm256_set1_epi8(15));
        const __m256i stored = _mm256_xor_si256(four, _mm256_set1_epi8(8));
        const __m256i pairs = _mm256_maddubs_epi16(stored, _mm256_set1_epi16(0x1001));  // low + 16 * high
        _mm_storeu_si128((__m128i*)(words + i / 8), _mm256_cvtepi16_epi8(pairs));
    }
#else
    for (int64_t i = 0; i < n; i += 8) words[i / 8] = pack8(load<uint64_t>(codes + i) ^ 0x0808080808080808u);
#endif
}
// Adds how many of n such codes are stored as 0 to 15.
QK_INLINE void count_codes(const uint8_t* codes, int64_t n, int64_t* counts) {
#if QK_WIDTH == 16
    for (int64_t i = 0; i < n; i += 32) {
        const __m256i four = _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(codes + i)), _mm256_set1_epi8(15));
        for (int stored = 0; stored < 16; ++stored)
            counts[stored] += __builtin_popcount(_mm256_cmpeq_epi8_mask(four, _mm256_set1_epi8(char(stored ^ 8))));
    }
#else
    for (int64_t i = 0; i < n; ++i) ++counts[(codes[i] & 15) ^ 8];
#endif
}
QK_INLINE uint64_t unpack8(uint64_t x) {
    x = (x | x << 16) & 0x0000ffff0000ffffu;
    x = (x | x << 8) & 0x00ff00ff00ff00ffu;
    return (x | x << 4) & 0x0f0f0f0f0f0f0f0fu;
}

void int4_read(const QkInt4& w, int64_t row, int64_t column, int64_t n, float* out) {
    const uint32_t* words = w.packed + row * w.stride + column / 8;
    const uint16_t* scales = w.scale + row * w.scale_stride;
    uint64_t nibbles[CHUNK / 8];
    for (int64_t i = 0; i < (n + 7) / 8; ++i) nibbles[i] = unpack8(words[i]);
    const uint8_t* stored = reinterpret_cast<const uint8_t*>(nibbles);
    segments(column, n, w.group_size, [&](int64_t start, int64_t length, int64_t index) QK_LAMBDA {
        const vf scale = from_bf16(splati(scales[index]));
        vectors(length, [&](int64_t i, int lanes) QK_LAMBDA {
            const vi q = widen(load_some<vb>(stored + start + i, lanes)) - 8;
            store_some(out + start + i, __builtin_convertvector(q, vf) * scale, lanes);
        });
    });
}

}  // namespace
