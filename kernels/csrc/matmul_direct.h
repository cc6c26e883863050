// Few activation rows: weights are decoded in registers, row after row as they lie in memory. Part of matmul_impl.h.
namespace {

// total[r] += the units at activation `at` of four rows times activations r.
template <int Kind, int R>
QK_INLINE void direct_unit(const Row (&units)[TILE], const Act* const* x, int64_t at, Total (&total)[R]) {
    Total scale[A::SPANS], sum[A::SPANS][R][TILE];
    if constexpr (R <= 2 && STEPS <= 4) {  // registers hold four decoded rows
        Weight w[TILE][STEPS];
        QK_UNROLL
        for (int n = 0; n < TILE; ++n) A::decode<Kind>(units[n].codes, w[n]);
        QK_UNROLL
        for (int i = 0; i < R * TILE; ++i) sum[0][i / TILE][i % TILE] = A::zero();
        QK_UNROLL
        for (int i = 0; i < STEPS; ++i) {
            QK_UNROLL
            for (int r = 0; r < R; ++r) {
                A::Input input = A::input(x[r] + at + i * (UNIT / STEPS));
                A::keep(input);
                QK_UNROLL
                for (int n = 0; n < TILE; ++n) sum[0][r][n] = A::dot(sum[0][r][n], w[n][i], input);
            }
        }
    } else {
        QK_UNROLL
        for (int n = 0; n < TILE; ++n) {
            Weight w[STEPS];
            A::decode<Kind>(units[n].codes, w);
            QK_UNROLL
            for (int i = 0; i < A::SPANS * R; ++i) {
                Total& s = sum[i / R][i % R][n];
                s = A::zero();
                const Act* input = x[i % R] + at + i / R * A::STEPS * (UNIT / STEPS);
                QK_UNROLL
                for (int k = 0; k < A::STEPS; ++k)
                    s = A::dot(s, w[i / R * A::STEPS + k], A::input(input + k * (UNIT / STEPS)));
            }
        }
    }
    A::scales<Kind>(units, scale);
    QK_UNROLL
    for (int span = 0; span < A::SPANS; ++span) {
        QK_UNROLL
        for (int r = 0; r < R; ++r) total[r] = A::fma(A::fold4(sum[span][r]), scale[span], total[r]);
    }
}

// Whole units [first, last) of four rows, while the units from `at` on of four others are prefetched.
template <int Kind, int R>
QK_INLINE void direct_units(const Row (&rows)[TILE], int64_t first, int64_t last, const Row (&others)[TILE], int64_t at,
                            const Act* const* x, const Shape& shape, Total (&total)[R]) {
    for (int64_t u = first; u < last; ++u, ++at) {
        Unit copies[TILE];
        Row units[TILE];
        QK_UNROLL
        for (int n = 0; n < TILE; ++n) {
            units[n] = whole_unit<Kind>(rows[n], u, shape, copies[n]);
            for (int line = 0; line < unit_bytes(Kind); line += 64)
                A::prefetch(others[n].codes + at * unit_bytes(Kind) + line);
        }
        direct_unit<Kind, R>(units, x, u * UNIT, total);
    }
}

// out[r * stride + o] for R activation rows and all weight rows.
template <int Kind, int R>
void direct(const Rows& rows, const Act* const* x, const Shape& shape, float* out, int64_t stride) {
    const int64_t lead = AHEAD / unit_bytes(Kind), whole = shape.whole;
    const int64_t tiles = whole && lead / whole < TILES_AHEAD ? lead / whole : TILES_AHEAD;
    const int64_t rest = tiles < TILES_AHEAD ? lead % whole : 0;
    for (int o = 0; o < rows.count; o += TILE) {
        Row tile[TILE], near[TILE], far[TILE];
        for (int n = 0; n < TILE; ++n) {
            tile[n] = rows.at(o + n);
            near[n] = rows.ahead(o + n + TILE * int(tiles));
            far[n] = rows.ahead(o + n + TILE * int(tiles + 1));
        }
        if constexpr (is_int4(Kind))
            for (int64_t byte = 0; byte < whole * scale_bytes(Kind); byte += 64)
                for (int n = 0; n < TILE; ++n) A::prefetch(far[n].scale + byte);
        Total total[R];
        QK_UNROLL
        for (int r = 0; r < R; ++r) total[r] = A::zero();
        direct_units<Kind, R>(tile, 0, whole - rest, near, rest, x, shape, total);
        direct_units<Kind, R>(tile, whole - rest, whole, far, 0, x, shape, total);
        if (whole < shape.units) {
            Unit copies[TILE];
            Row units[TILE];
            for (int n = 0; n < TILE; ++n) units[n] = partial_unit<Kind>(tile[n], shape, copies[n]);
            direct_unit<Kind, R>(units, x, whole * UNIT, total);
        }
        for (int r = 0; r < R; ++r) finish(total[r], rows.count - o, out + r * stride + o);
    }
}

}  // namespace
