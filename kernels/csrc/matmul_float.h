// Arithmetic of matmul_impl.h in float32, for every instruction set without bf16 products.
//
// A unit of 128 columns is 4 * 8 / W spans of 8 W columns; lane l of step i is column 8 l + i of the span, so that a
// vector of INT4 words gives all eight steps by shifts, and lane l belongs to its group of 32 columns, l / 4. Plain
// bf16 needs no such order: step after step, lane after lane.
#include "matmul_unit.h"

namespace {

struct Arithmetic {
    typedef float Act;
    typedef vf Total;
    typedef vf Weight;
    typedef vf Input;
    static constexpr int STEPS = 8, SPANS = UNIT / (8 * W), ROWS = W == 16 ? 4 : 2;

    static QK_INLINE vf zero() { return vf{}; }
    static QK_INLINE vf input(const float* x) { return load<vf>(x); }
    static QK_INLINE vf dot(vf sum, vf w, vf x) { return fma(w, x, sum); }
    static QK_INLINE vf fma(vf a, vf b, vf c) {
#if QK_WIDTH == 16
        return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif QK_WIDTH == 8
        return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
        return a * b + c;
#endif
    }
    static QK_INLINE void keep(vf&) {}
    // The sums of each run of four lanes of each of four vectors, W / 4 of the first, then of the second, ...
    static QK_INLINE vf fold4(const vf (&v)[4]) {
        return fold<1>(Add{}, fold<2>(Add{}, v[0], v[1]), fold<2>(Add{}, v[2], v[3]));
    }
    static QK_INLINE void finish(vf v, float* out) {
#if QK_WIDTH == 16
        v = fold<2>(Add{}, v, v);
#endif
#if QK_WIDTH >= 8
        v = fold<1>(Add{}, v, v);
#endif
        memcpy(out, &v, 16);
    }

    // Unit of n <= 128 bf16 activations, zeros after them.
    template <int Kind>
    static void arrange(const uint16_t* x, int n, float* out) {
        for (int i = 0; i < UNIT; ++i) {
            const int column = Kind == PLAIN ? i : i / (8 * W) * (8 * W) + i % W * 8 + i / W % 8;
            const uint32_t bits = column < n ? uint32_t(x[column]) << 16 : 0;
            memcpy(out + i, &bits, 4);
        }
    }

    template <int Kind>
    static QK_INLINE void scales(const Row* units, vf* out) {
        float stored[4][4], lanes[W];
        for (int n = 0; n < 4; ++n) unit_scales<Kind>(units[n].scale, stored[n]);
        for (int span = 0; span < SPANS; ++span) {
            for (int i = 0; i < W; ++i) lanes[i] = stored[i / (W / 4)][span * (W / 4) + i % (W / 4)];
            out[span] = load<vf>(lanes);
        }
    }

    template <int Kind>
    static QK_INLINE void decode(const uint8_t* codes, vf* w) {
        for (int span = 0; span < SPANS; ++span) {
            if constexpr (Kind == PLAIN) {
                QK_UNROLL
                for (int i = 0; i < 8; ++i)
                    w[span * 8 + i] = number(widen(load<vh>(codes + 2 * W * (span * 8 + i))) << 16);
            } else if constexpr (is_int4(Kind)) {
                const vi words = load<vi>(codes + span * 4 * W);
                QK_UNROLL
                for (int i = 0; i < 8; ++i)
                    w[span * 8 + i] = __builtin_convertvector(((words >> (4 * i)) & 15) - 8, vf);
            } else {
                const vi a = load<vi>(codes + span * 8 * W), b = load<vi>(codes + span * 8 * W + 4 * W);
                const vi words[2] = {fold<1>(First{}, a, b), fold<1>(Second{}, a, b)};
                QK_UNROLL
                for (int i = 0; i < 8; ++i) w[span * 8 + i] = e4m3((words[i / 4] >> (8 * (i % 4))) & 255);
            }
        }
    }

    static QK_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

private:
    struct First {
        QK_INLINE vi operator()(vi a, vi) const { return a; }
    };
    struct Second {
        QK_INLINE vi operator()(vi, vi b) const { return b; }
    };
    // Exact for every code: exponent 0 is decoded with an implicit one, which is then taken off; the NaNs stay NaN.
    static QK_INLINE vf e4m3(vi c) {
        const vi size = c & 0x7f;
        const vi is_subnormal = (c & 0x78) == 0;
        const vf value = number((size << 20) + (120 << 23) + (is_subnormal & (1 << 23))) -
                         number(is_subnormal & 0x3c800000);
        return number(bits(value) | ((size == 0x7f) & 0x7fc00000) | ((c & 0x80) << 24));
    }
};

}  // namespace

#include "matmul_impl.h"
