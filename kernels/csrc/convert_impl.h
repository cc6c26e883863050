// The conversion operations, compiled once for every instruction set (convert_portable/avx2/avx512.cpp).
//
// A row is handled in chunks that stay in the first-level cache: decode to float32, then quantize or store. Groups
// are handled W at a time, group i's scale and sums in lane i, so that the scale search runs without horizontal
// operations other than the final fold. The meaning of every step is that of torch_twin.py, bit for bit.
#include "codec.h"

namespace {

QK_INLINE vf clamped(vf t) { return maxf(minf(t, splat(7.0f)), splat(-8.0f)); }

// Sum over each of W groups of G weights of f(index of the weight, group's scale); lane i is group i.
template <int G, class F>
QK_INLINE vf group_sums(const float* scales, const F& f) {
    return across<W>(
        Add{},
        [&](int i) QK_LAMBDA {
            const vf s = splat(scales[i]);
            return along<G / W, 1>(
                Add{}, [&](int k) QK_LAMBDA { return f(i * G + k * W, s); }, 0);
        },
        0);
}

// q of the quotient t = w / s.
QK_INLINE vf code_of(vf t) { return (clamped(t) + ROUND) - ROUND; }

QK_INLINE vf squared_error(vf w, vf s, vf q) {
    const vf d = w - s * q;
    return d * d;
}

// Quantizes W groups of G weights, of which `groups` are written; `importance` belongs to these weights or is null.
// False: one of them is not finite.
template <int G>
bool quantize_batch(const float* w, const float* importance, int groups, const QkInt4Out& out, int64_t group) {
    const vi top = across<W>(
        Max{},
        [&](int i) QK_LAMBDA {
            return along<G / W, 1>(
                Max{}, [&](int k) QK_LAMBDA { return magnitude(load<vf>(w + i * G + k * W)); }, 0);
        },
        0);
    if (any(top >= INFINITE)) return false;
    const vf base = number(top) / splat(7.5f);

    float scales[W];  // that the codes are made with
    vf best_scale{}, best_error{}, first_error{};
    const auto search = [&](const auto& term) QK_LAMBDA {
        for (int64_t c = 0; c < out.num_factors; ++c) {
            const vf rounded = from_bf16(bf16_of(base * splat(out.factors[c])));
            const vf scale = rounded == vf{} ? splat(INT4_ZERO_SCALE) : rounded;
            store(scales, scale);
            const vf error = group_sums<G>(scales, term);
            const vi is_better = c == 0 ? ~vi{} : error < best_error;
            best_scale = is_better ? scale : best_scale;
            best_error = is_better ? error : best_error;
            if (c == 0) first_error = error;
        }
        store(scales, best_scale);
    };
    const auto plain = [&](int i, vf s) QK_LAMBDA {
        const vf x = load<vf>(w + i);
        return squared_error(x, s, code_of(x / s));
    };
    if (importance) {
        search([&](int i, vf s) QK_LAMBDA { return plain(i, s) * load<vf>(importance + i); });
        best_error = group_sums<G>(scales, plain);
    } else {
        search(plain);
        if (out.is_unbiased) {
            const vf overlap = group_sums<G>(scales, [&](int i, vf s) QK_LAMBDA {
                const vf t = load<vf>(w + i) / s;
                return code_of(t) * t;
            });
            const vf square = group_sums<G>(scales, [&](int i, vf s) QK_LAMBDA {
                const vf t = load<vf>(w + i) / s;
                return t * t;
            });
            const vf rounded = from_bf16(bf16_of(best_scale * (square / overlap)));
            const vf unbiased = overlap > vf{} ? rounded : best_scale;
            float stored[W];
            store(stored, unbiased);
            const vf error = group_sums<G>(scales, [&](int i, vf s) QK_LAMBDA {
                const vf x = load<vf>(w + i);
                return squared_error(x, splat(stored[i / G]), code_of(x / s));
            });
            const vi is_kept = error <= first_error;
            best_scale = is_kept ? unbiased : best_scale;
            best_error = is_kept ? error : best_error;
        }
    }
    const vf energy = group_sums<G>(scales, [&](int i, vf) QK_LAMBDA {
        const vf x = load<vf>(w + i);
        return x * x;
    });
    store_some(out.scale + group, to_halves(bf16_of(best_scale)), groups);
    store_some(out.error + group, best_error, groups);
    store_some(out.energy + group, energy, groups);

    uint64_t nibbles[W * G / 8];
    for (int i = 0; i < groups; ++i) {
        const vf s = splat(scales[i]);
        for (int k = 0; k < G; k += W) {
            const vi q = bits(clamped(load<vf>(w + i * G + k) / s) + (ROUND + 8.0f)) & 15;
            store(reinterpret_cast<uint8_t*>(nibbles) + i * G + k, to_bytes(q));
        }
    }
    uint32_t* words = out.packed + group * (G / 8);
    for (int i = 0; i < groups * G / 8; ++i) words[i] = pack8(nibbles[i]);
    return true;
}

// Quantizes n weights (whole groups, n <= CHUNK); `w` is padded here, `importance` has room. False: one is not finite.
template <int G>
bool quantize_chunk(float* w, const float* importance, int64_t n, const QkInt4Out& out, int64_t group) {
    const int64_t batch = int64_t(W) * G, padded = (n + batch - 1) / batch * batch;
    memset(w + n, 0, size_t(padded - n) * 4);
    for (int64_t i = 0; i < n; i += batch)
        if (!quantize_batch<G>(w + i, importance ? importance + i : nullptr, int(smaller(n - i, batch) / G), out,
                               group + i / G))
            return false;
    return true;
}

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
