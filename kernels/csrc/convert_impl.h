// The conversion operations, compiled once for every instruction set (convert_portable/avx2/avx512.cpp).
//
// A row is handled in chunks that stay in the first-level cache: decode to float32, then quantize or store. The
// meaning of every step is that of torch_twin.py, bit for bit.
#include "quantize.h"

namespace {

// read(row, column, n, buffer) gives float32 weights, codes_at(row, column) the codes or null.
template <class Read, class Codes>
QK_INLINE int to_int4(int64_t rows, int64_t columns, const QkInt4Out& out, int64_t* where, const Read& read,
                      const Codes& codes_at) {
    const int64_t g = out.group_size;
    if (g != 32 && g != 64 && g != 128) return QK_BAD_ARGUMENT;
    float w[CHUNK], room[CHUNK] = {};
    const float* importance = out.importance ? room : nullptr;
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < columns; column += CHUNK) {
            const int64_t n = smaller(CHUNK, columns - column), group = row * (columns / g) + column / g;
            const uint8_t* codes = codes_at(row, column);
            read(row, column, n, w);
            if (importance) memcpy(room, out.importance + column, size_t(n) * 4);
            bool is_good = !codes || !has_nan_code(codes, n);
            if (is_good)
                is_good = g == 32   ? quantize_chunk<32>(w, importance, n, out, group)
                          : g == 64 ? quantize_chunk<64>(w, importance, n, out, group)
                                    : quantize_chunk<128>(w, importance, n, out, group);
            if (!is_good) return first_bad(codes, w, n, row, column, where);
        }
    }
    return QK_OK;
}

int fp8_to_int4(const QkFp8* w, const QkInt4Out* out, int64_t* where) {
    return to_int4(
        w->rows, w->columns, *out, where,
        [&](int64_t row, int64_t column, int64_t n, float* to) { fp8_read(*w, row, column, n, to); },
        [&](int64_t row, int64_t column) { return w->codes + row * w->stride + column; });
}

int plain_to_int4(const QkPlain* w, const QkInt4Out* out, int64_t* where) {
    return to_int4(
        w->rows, w->columns, *out, where,
        [&](int64_t row, int64_t column, int64_t n, float* to) { plain_read(*w, row, column, n, to); },
        [](int64_t, int64_t) -> const uint8_t* { return nullptr; });
}

template <class Write>
QK_INLINE int fp8_to(const QkFp8& w, int64_t* where, const Write& write) {
    for (int64_t row = 0; row < w.rows; ++row) {
        for (int64_t column = 0; column < w.columns; column += CHUNK) {
            const int64_t n = smaller(CHUNK, w.columns - column);
            const uint8_t* codes = w.codes + row * w.stride + column;
            if (has_nan_code(codes, n)) {
                const float zeros[CHUNK] = {};
                return first_bad(codes, zeros, n, row, column, where);
            }
            write(row, column, n);
        }
    }
    return QK_OK;
}

int fp8_to_float32(const QkFp8* w, float* out, int64_t* where) {
    return fp8_to(*w, where, [&](int64_t row, int64_t column, int64_t n) {
        fp8_read(*w, row, column, n, out + row * w->columns + column);
    });
}

int fp8_to_bf16(const QkFp8* w, uint16_t* out, int64_t* where) {
    return fp8_to(*w, where, [&](int64_t row, int64_t column, int64_t n) {
        float x[CHUNK];
        fp8_read(*w, row, column, n, x);
        narrow_bf16(x, n, out + row * w->columns + column);
    });
}

int int4_to_float32(const QkInt4* w, float* out) {
    for (int64_t row = 0; row < w->rows; ++row)
        for (int64_t column = 0; column < w->columns; column += CHUNK)
            int4_read(*w, row, column, smaller(CHUNK, w->columns - column), out + row * w->columns + column);
    return QK_OK;
}

int int4_to_bf16(const QkInt4* w, uint16_t* out) {
    float x[CHUNK];
    for (int64_t row = 0; row < w->rows; ++row) {
        for (int64_t column = 0; column < w->columns; column += CHUNK) {
            const int64_t n = smaller(CHUNK, w->columns - column);
            int4_read(*w, row, column, n, x);
            narrow_bf16(x, n, out + row * w->columns + column);
        }
    }
    return QK_OK;
}

// Raises every absmax[index] to that of the row; false: a weight is not finite.
QK_INLINE bool raise_absmax(const float* x, int64_t column, int64_t n, int64_t block, float* absmax) {
    bool is_good = true;
    segments(column, n, block, [&](int64_t start, int64_t length, int64_t index) QK_LAMBDA {
        vi top{};
        vectors(length, [&](int64_t i, int lanes) QK_LAMBDA {
            top = maxi(top, magnitude(load_some<vf>(x + start + i, lanes)));
        });
        int32_t highest;
        memcpy(&highest, absmax + index, 4);
        for (int i = 0; i < W; ++i) highest = top[i] > highest ? top[i] : highest;
        memcpy(absmax + index, &highest, 4);
        is_good &= highest < INFINITE;
    });
    return is_good;
}

int plain_to_fp8(const QkPlain* w, int64_t block_rows, int64_t block_columns, uint8_t* codes, float* scales,
                 int64_t* where) {
    const int64_t blocks = (w->columns + block_columns - 1) / block_columns;
    float x[CHUNK];
    for (int64_t band = 0; band < w->rows; band += block_rows, scales += blocks) {
        const int64_t end = smaller(band + block_rows, w->rows);
        memset(scales, 0, size_t(blocks) * 4);
        for (int64_t row = band; row < end; ++row)
            for (int64_t column = 0; column < w->columns; column += CHUNK) {
                const int64_t n = smaller(CHUNK, w->columns - column);
                plain_read(*w, row, column, n, x);
                if (!raise_absmax(x, column, n, block_columns, scales))
                    return first_bad(nullptr, x, n, row, column, where);
            }
        for (int64_t i = 0; i < blocks; ++i) {
            scales[i] /= 448.0f;
            if (scales[i] == 0) scales[i] = FP8_ZERO_SCALE;
        }
        for (int64_t row = band; row < end; ++row)
            for (int64_t column = 0; column < w->columns; column += CHUNK) {
                const int64_t n = smaller(CHUNK, w->columns - column);
                uint8_t* to = codes + row * w->columns + column;
                plain_read(*w, row, column, n, x);
                segments(column, n, block_columns, [&](int64_t start, int64_t length, int64_t index) QK_LAMBDA {
                    const vf scale = splat(scales[index]);
                    vectors(length, [&](int64_t i, int lanes) QK_LAMBDA {
                        const vi code = encode_e4m3(load_some<vf>(x + start + i, lanes) / scale);
                        store_some(to + start + i, to_bytes(code), lanes);
                    });
                });
            }
    }
    return QK_OK;
}

int bf16_to_float32(const uint16_t* in, int64_t count, float* out) {
    widen_bf16(in, count, out);
    return QK_OK;
}

int float32_to_bf16(const float* in, int64_t count, uint16_t* out) {
    narrow_bf16(in, count, out);
    return QK_OK;
}

const QkOps OPS = {fp8_to_float32, fp8_to_bf16,  fp8_to_int4,     plain_to_int4,  int4_to_float32,
                   int4_to_bf16,   plain_to_fp8, bf16_to_float32, float32_to_bf16};

}  // namespace
