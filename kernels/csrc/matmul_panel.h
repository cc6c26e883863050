// Many activation rows: a panel of weights is decoded once for all of them. Part of matmul_impl.h.
namespace {

// Decodes units [first, last) of the weight rows into the panel; the last row fills up its tile.
template <int Kind>
void fill(const Rows& rows, int64_t first, int64_t last, const Shape& shape, Scratch& scratch) {
    const bool is_last = last == shape.units;  // and so the next panel is of the next rows
    const int64_t ahead = is_last ? rows.next - first * unit_bytes(Kind) : DEPTH * unit_bytes(Kind);
    const int64_t ahead_scale = is_last ? rows.next_scale - first * scale_bytes(Kind) : DEPTH * scale_bytes(Kind);
    for (int o = 0; o < rows.count; o += TILE) {
        for (int64_t u = first; u < last; ++u) {
            Unit copies[TILE];
            Row units[TILE];
            for (int n = 0; n < TILE; ++n) {
                const Row& row = rows.at(o + n);
                for (int line = 0; line < unit_bytes(Kind); line += 64)
                    A::prefetch(row.codes + u * unit_bytes(Kind) + ahead + line);
                if (is_int4(Kind)) A::prefetch(row.scale + u * scale_bytes(Kind) + ahead_scale);
                units[n] = u < shape.whole ? whole_unit<Kind>(row, u, shape, copies[n])
                                           : partial_unit<Kind>(row, shape, copies[n]);
                Weight w[STEPS];
                A::decode<Kind>(units[n].codes, w);
                QK_UNROLL
                for (int i = 0; i < STEPS; ++i) scratch.panel[o / TILE][u - first][i][n] = w[i];
            }
            Total scale[A::SPANS];
            A::scales<Kind>(units, scale);
            for (int i = 0; i < A::SPANS; ++i) scratch.scales[o / TILE][u - first][i] = scale[i];
        }
    }
}

// total[r] += `units` units of a panel's tile times activations r.
template <int R>
QK_INLINE void kernel(const Weight (*w)[STEPS][TILE], const Total (*s)[A::SPANS], const Act* const* x, int64_t units,
                      Total (&total)[R]) {
    for (int64_t u = 0; u < units; ++u) {
        QK_UNROLL
        for (int span = 0; span < A::SPANS; ++span) {
            Total sum[R][TILE];
            QK_UNROLL
            for (int i = 0; i < R * TILE; ++i) sum[i / TILE][i % TILE] = A::zero();
            QK_UNROLL
            for (int i = span * A::STEPS; i < (span + 1) * A::STEPS; ++i) {
                Weight weight[TILE];
                QK_UNROLL
                for (int n = 0; n < TILE; ++n) weight[n] = w[u][i][n], A::keep(weight[n]);
                QK_UNROLL
                for (int r = 0; r < R; ++r) {
                    A::Input input = A::input(x[r] + u * UNIT + i * (UNIT / STEPS));
                    A::keep(input);
                    QK_UNROLL
                    for (int n = 0; n < TILE; ++n) sum[r][n] = A::dot(sum[r][n], weight[n], input);
                }
            }
            Total scale = s[u][span];
            A::keep(scale);
            QK_UNROLL
            for (int r = 0; r < R; ++r) total[r] = A::fma(A::fold4(sum[r]), scale, total[r]);
        }
    }
}

// Activation rows r to r + R - 1 times the whole panel.
template <int R>
void sweep(int count, int64_t first, int64_t last, const Shape& shape, int r, Scratch& scratch, float* out) {
    const Act* x[R];
    for (int i = 0; i < R; ++i) x[i] = scratch.x[r + i] + first * UNIT;
    for (int o = 0; o < count; o += TILE) {
        Total total[R];
        QK_UNROLL
        for (int i = 0; i < R; ++i) total[i] = first ? scratch.totals[r + i][o / TILE] : A::zero();
        kernel<R>(scratch.panel[o / TILE], scratch.scales[o / TILE], x, last - first, total);
        QK_UNROLL
        for (int i = 0; i < R; ++i) {
            if (last < shape.units)
                scratch.totals[r + i][o / TILE] = total[i];
            else
                finish(total[i], count - o, out + (r + i) * count + o);
        }
    }
}

template <int Kind>
void panels(const Rows& rows, int n, const Shape& shape, Scratch& scratch, float* out) {
    for (int64_t first = 0; first < shape.units; first += DEPTH) {
        const int64_t last = first + DEPTH < shape.units ? first + DEPTH : shape.units;
        fill<Kind>(rows, first, last, shape, scratch);
        int r = 0;
        for (; r + A::ROWS <= n; r += A::ROWS) sweep<A::ROWS>(rows.count, first, last, shape, r, scratch, out);
        if (n - r == 3) sweep<3>(rows.count, first, last, shape, r, scratch, out);
        if (n - r == 2) sweep<2>(rows.count, first, last, shape, r, scratch, out);
        if (n - r == 1) sweep<1>(rows.count, first, last, shape, r, scratch, out);
    }
}

}  // namespace
