// The conversion operations, compiled once for every instruction set (convert_portable/avx2/avx512.cpp).
//
// A row is handled in chunks that stay in the first-level cache: decode to float32, then quantize or store. Groups
// are handled W at a time, group i's scale and sums in lane i, so that the scale search runs without horizontal
// operations other than the final fold. The meaning of every step is that of torch_twin.py, bit for bit.
#include "codec.h"

namespace {

QK_INLINE vf clamped(vf t) { return maxf(minf(t, splat(7.0f)), splat(-8.0f)); }

// Sum over each of W groups of G weights of f(index of the weight, group); lane i is group i.
template <int G, class F>
QK_INLINE vf group_sums(const F& f) {
    return across<W>(
        Add{},
        [&](int i) QK_LAMBDA {
            return along<G / W, 1>(
                Add{}, [&](int k) QK_LAMBDA { return f(i * G + k * W, i); }, 0);
        },
        0);
}

// The code q of the quotient t = w / s as bits of ROUND + q, and as a number.
QK_INLINE vi rounded(vf t) { return bits(clamped(t) + ROUND); }
QK_INLINE vf code(vi z) { return number(z) - ROUND; }

QK_INLINE vf squared_error(vf w, vf s, vf q) {
    const vf d = w - s * q;
    return d * d;
}

// The scales of W groups, and bounds of what a division by them gives.
struct Scales {
    float values[W];
#if QK_WIDTH > 4
    float low[W], high[W];
    bool is_ordinary;  // neither a scale nor its inverse is near an end of the float32 range
#endif

    QK_INLINE explicit Scales(vf scale) {
        store(values, scale);
#if QK_WIDTH > 4
        const vf inverse = splat(1.0f) / scale;
        store(low, inverse * splat(1.0f - 0x1p-22f));
        store(high, inverse * splat(1.0f + 0x1p-22f));
        is_ordinary = !any((scale < splat(0x1p-100f)) | (scale > splat(0x1p100f)));
        __asm__("" : "+m"(values), "+m"(low), "+m"(high));  // broadcast from memory, which is free; GCC shuffles
#endif
    }
};

// Group sums of term(index, scale, z), z = rounded(fl(w / s)), mostly without dividing.
//
// Where both bounds round to the same integer, that is q. Proof, for w >= 0 (w < 0 mirrors it): fl(1 / s) is within
// 2^-24 of 1 / s relative, and so is the rounding of low and high, so that low < (1 - 2^-24) / s and
// high > (1 + 2^-24) / s. fl(w / s) is within 2^-24 of w / s relative, or below 2^-126, where all is 0. Hence
// w * low <= fl(w / s) <= w * high, and rounding to integers is monotonic. The sum w * low + ROUND is rounded once,
// to an integer, since |w / s| < 17 for every candidate (search.py). Clamping comes after rounding here and before it
// in `rounded`; as its limits are integers that is the same.
template <int G, class Term>
QK_INLINE vf code_sums(const float* w, const Scales& scales, const Term& term) {
#if QK_WIDTH > 4
    if (__builtin_expect(scales.is_ordinary, 1)) {
        vi differ{};
        const vf sums = group_sums<G>([&](int i, int g) QK_LAMBDA {
            const vf x = load<vf>(w + i);
            const vi z = bits(fused(x, splat(scales.low[g]), splat(ROUND)));
            differ |= z ^ bits(fused(x, splat(scales.high[g]), splat(ROUND)));
            __asm__("" : "+x"(differ));  // now: GCC would keep all z for a tree of ors at the end
            const vi clamped_z = maxi(mini(z, bits(splat(ROUND + 7.0f))), bits(splat(ROUND - 8.0f)));
            return term(i, splat(scales.values[g]), clamped_z);
        });
        if (__builtin_expect(!any(differ != 0), 1)) return sums;
    }
#endif
    return group_sums<G>([&](int i, int g) QK_LAMBDA {
        const vf s = splat(scales.values[g]);
        return term(i, s, rounded(load<vf>(w + i) / s));
    });
}

// The scale of output gain 1 for the codes of `scales` (search.py): that, and the sum of squared errors with it,
// where it is no worse than `first_error`; else what was found.
template <int G>
QK_INLINE void unbias(const float* w, const Scales& scales, vf first_error, vf& scale, vf& error) {
    float t[W * G];
    for (int i = 0; i < W * G; i += W) store(t + i, load<vf>(w + i) / splat(scales.values[i / G]));
    const vf overlap = group_sums<G>([&](int i, int) QK_LAMBDA { 
        return code(rounded(load<vf>(t + i))) * load<vf>(t + i);
    });
    const vf square = group_sums<G>([&](int i, int) QK_LAMBDA { return load<vf>(t + i) * load<vf>(t + i); });
    const vf wanted = from_bf16(bf16_of(scale * (square / overlap)));
    const vf unbiased = overlap > vf{} ? wanted : scale;
    float stored[W];
    store(stored, unbiased);
    const vf found = group_sums<G>([&](int i, int g) QK_LAMBDA {
        return squared_error(load<vf>(w + i), splat(stored[g]), code(rounded(load<vf>(t + i))));
    });
    const vi is_kept = found <= first_error;
    scale = is_kept ? unbiased : scale;
    error = is_kept ? found : error;
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
    const auto candidate = [&](int64_t c) QK_LAMBDA {
        const vf scale = from_bf16(bf16_of(base * splat(out.factors[c])));
        return Scales(scale == vf{} ? splat(INT4_ZERO_SCALE) : scale);
    };
    const auto plain = [&](int i, vf s, vi z) QK_LAMBDA { return squared_error(load<vf>(w + i), s, code(z)); };
    const auto weighted = [&](int i, vf s, vi z) QK_LAMBDA { return plain(i, s, z) * load<vf>(importance + i); };
    uint8_t codes[W * G];
    const auto kept = [&](int i, vf s, vi z) QK_LAMBDA {
        store(codes + i, to_bytes(z & 15));
        return plain(i, s, z);
    };

    Scales scales = candidate(0);
    vf best_scale = load<vf>(scales.values), best_error;
    if (out.num_factors == 1 && !importance && !out.is_unbiased) {
        best_error = code_sums<G>(w, scales, kept);
    } else {
        best_error = importance ? code_sums<G>(w, scales, weighted) : code_sums<G>(w, scales, plain);
        const vf first_error = best_error;
        for (int64_t c = 1; c < out.num_factors; ++c) {
            const Scales other = candidate(c);
            const vf error = importance ? code_sums<G>(w, other, weighted) : code_sums<G>(w, other, plain);
            const vi is_better = error < best_error;
            best_scale = is_better ? load<vf>(other.values) : best_scale;
            best_error = is_better ? error : best_error;
        }
        scales = Scales(best_scale);
        const vf error = code_sums<G>(w, scales, kept);
        if (importance) best_error = error;
        else if (out.is_unbiased) unbias<G>(w, scales, first_error, best_scale, best_error);
    }
    const vf energy = group_sums<G>([&](int i, int) QK_LAMBDA { return load<vf>(w + i) * load<vf>(w + i); });
    store_some(out.scale + group, to_halves(bf16_of(best_scale)), groups);
    store_some(out.error + group, best_error, groups);
    store_some(out.energy + group, energy, groups);
    pack_codes(codes, int64_t(groups) * G, out.packed + group * (G / 8));
    if (out.counts) count_codes(codes, int64_t(groups) * G, out.counts);
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
