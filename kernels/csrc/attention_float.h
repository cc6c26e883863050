// Arithmetic of attention_impl.h in float32, for every instruction set without bf16 products.
#include "attention_tile.h"

namespace {

struct Arithmetic {
    typedef float Element;
    static constexpr int PACK = 1;  // elements of one column (keys) or token (values) in a lane
    static constexpr int RUN = W == 4 ? 3 : 4;  // rows whose sums are in registers

    static void decode(const uint8_t* codes, int64_t n, float* out) {
        vectors(n, [&](int64_t i, int lanes) QK_LAMBDA {
            store_some(out + i, decode_e4m3_or_nan(load_some<vb>(codes + i, lanes)), lanes);
        });
    }
    static void copy(const uint8_t* bf16, int64_t n, float* out) {
        vectors(n, [&](int64_t i, int lanes) QK_LAMBDA {
            vh halves{};
            memcpy(&halves, bf16 + 2 * i, size_t(lanes) * 2);
            store_some(out + i, from_bf16(widen(halves)), lanes);
        });
    }
    static QK_INLINE void put(float* to, vf x) { store(to, x); }
    static bool is_finite(const float* x, int64_t n) {
        vi found{};
        for (int64_t i = 0; i + W <= n; i += W) found |= magnitude(load<vf>(x + i)) >= INFINITE;
        return !any_lane(found);
    }

    static void transpose(const float* rows, int64_t stride, int64_t columns, float* keys) {
        for (int64_t c = 0; c < columns; ++c)
            for (int t = 0; t < GROUP; ++t) keys[c * TILE + t] = rows[t * stride + c];
    }
    static void interleave(const float* rows, int64_t stride, int64_t columns, float* values) {
        for (int t = 0; t < GROUP; ++t) memcpy(values + t * columns, rows + t * stride, size_t(columns) * 4);
    }

    // s = (is_first ? 0 : s) + scale * (q k) for R rows and all tokens of the tile; a step is one column.
    template <int R>
    static void scores(const float* q, int64_t stride, const float* keys, int64_t steps, const float* scale,
                       float* s, bool is_first) {
        for (int t = 0; t < TILE; t += 2 * W) {
            vf sum[R][2] = {};
            for (int64_t c = 0; c < steps; ++c) {
                const vf a = load<vf>(keys + c * TILE + t), b = load<vf>(keys + c * TILE + t + W);
                for (int r = 0; r < R; ++r) {
                    const vf x = splat(q[r * stride + c]);
                    sum[r][0] = fma(x, a, sum[r][0]), sum[r][1] = fma(x, b, sum[r][1]);
                }
            }
            for (int r = 0; r < R; ++r)
                for (int i = 0; i < 2; ++i) {
                    float* to = s + r * TILE + t + i * W;
                    const vf before = is_first ? vf{} : load<vf>(to);
                    store(to, fma(sum[r][i], load<vf>(scale + t + i * W), before));
                }
        }
    }

    // sums = sums * factor + p v for R rows and `columns` columns from the first on; a step is one token.
    template <int R>
    static void weigh(const float* p, int64_t stride, const float* values, int64_t width, int64_t columns,
                      int64_t steps, const float* factor, float* sums) {
        for (int64_t c = 0; c < columns; c += 2 * W) {
            vf sum[R][2];
            for (int r = 0; r < R; ++r)
                for (int i = 0; i < 2; ++i) sum[r][i] = load<vf>(sums + r * width + c + i * W) * splat(factor[r]);
            for (int64_t t = 0; t < steps; ++t) {
                const vf a = load<vf>(values + t * width + c), b = load<vf>(values + t * width + c + W);
                for (int r = 0; r < R; ++r) {
                    const vf x = splat(p[r * stride + t]);
                    sum[r][0] = fma(x, a, sum[r][0]), sum[r][1] = fma(x, b, sum[r][1]);
                }
            }
            for (int r = 0; r < R; ++r)
                for (int i = 0; i < 2; ++i) store(sums + r * width + c + i * W, sum[r][i]);
        }
    }
};

}  // namespace

#include "attention_impl.h"
