// Groups of float32 weights to INT4: the scale search, codes without dividing, error, energy. Part of convert_impl.h.
//
// Groups are handled W at a time, group i's scale and sums in lane i, so that the search runs without horizontal
// operations other than the final fold.
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

    vf best_scale{}, best_error{}, first_error{};
    const bool has_choice = out.num_factors > 1 || importance;
    for (int64_t c = 0; has_choice && c < out.num_factors; ++c) {
        const Scales scales = candidate(c);
        const vf error = importance ? code_sums<G>(w, scales, weighted) : code_sums<G>(w, scales, plain);
        const vi is_better = c == 0 ? ~vi{} : error < best_error;
        best_scale = is_better ? load<vf>(scales.values) : best_scale;
        best_error = is_better ? error : best_error;
        if (c == 0) first_error = error;
    }
    const Scales scales = has_choice ? Scales(best_scale) : candidate(0);
    best_scale = load<vf>(scales.values);
    best_error = code_sums<G>(w, scales, kept);
    if (out.is_unbiased && !importance)
        unbias<G>(w, scales, has_choice ? first_error : best_error, best_scale, best_error);
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

}  // namespace
