// Rows of stored weights times rows of activations, compiled once for every instruction set.
//
// Columns run along the lanes, four weight rows at a time (a tile). Per unit of 128 columns the products of decoded
// weights and activations are summed in fresh accumulators; those of the four rows are folded into one vector, a
// lane for each row and run of 32 columns, which is multiplied by the vector of their scales and added to the total.
// That order is the same for one row and for many, so a row's result does not depend on what else is in the batch.
// Up to DIRECT rows the weights are decoded in registers; for more rows a panel of them is decoded into the
// second-level cache and used for all.
#include "runtime.h"

#include <stdlib.h>

namespace {

typedef Arithmetic A;
typedef A::Act Act;
typedef A::Total Total;
typedef A::Weight Weight;

constexpr int DIRECT = 8;        // most rows for which weights are decoded in registers
constexpr int TILE = 4;          // weight rows of the inner kernel
constexpr int OUTPUTS = 32;      // weight rows of a panel; a multiple of TILE
constexpr int DEPTH = 12;        // units of a panel: with the activations it fits the first-level cache
constexpr int CHUNK_ROWS = 128;  // activation rows whose totals are kept between panels
constexpr int WIDE = 256;        // weight rows that are taken at a time where there is no panel
constexpr int AHEAD = 4096;      // bytes that each of a tile's streams is prefetched ahead, into the second level
constexpr int TILES_AHEAD = 4;   // but no more than so many tiles
constexpr int BEYOND = TILE * (TILES_AHEAD + 1);
constexpr int STEPS = A::STEPS * A::SPANS;

struct Matrix {
    const uint8_t* codes;
    int64_t stride;  // bytes
    const uint8_t* scale;
    int64_t scale_stride;  // bytes
    int64_t block_rows;

    Row row(int64_t o) const { return Row{codes + o * stride, scale + o / block_rows * scale_stride}; }
    void rows(int64_t first, int count, Row* out) const {
        for (int o = 0; o < count; ++o) out[o] = row(first + o);
    }
};

struct Shape {
    int64_t columns, whole, units, block_columns;

    Shape(int64_t n, int64_t block) : columns(n), whole(n / UNIT), units((n + UNIT - 1) / UNIT), block_columns(block) {}
    int64_t padded() const { return units * UNIT; }
};

// Weight rows to multiply with. Those in [count, known), at most BEYOND, will be read next: they are prefetched.
struct Rows {
    Row row[WIDE + BEYOND];
    int count, known;
    int64_t next, next_scale;  // bytes from a row to the row that comes in its place in the next panel

    const Row& at(int o) const { return row[o < count ? o : count - 1]; }
    const Row& ahead(int o) const { return row[o < known ? o : known - 1]; }
};

// One thread's memory.
struct Scratch {
    alignas(64) Weight panel[OUTPUTS / TILE][DEPTH][STEPS][TILE];
    alignas(64) Total scales[OUTPUTS / TILE][DEPTH][A::SPANS];
    alignas(64) Total totals[CHUNK_ROWS][OUTPUTS / TILE];
    alignas(64) float result[CHUNK_ROWS * OUTPUTS];
    alignas(64) uint16_t natural[CHUNK_ROWS][UNIT];
    const Act* x[CHUNK_ROWS];  // activation rows
    Rows rows;
};

// Memory aligned to vectors; null data when there is none.
class Buffer {
    void* memory_;

public:
    explicit Buffer(int64_t bytes) : memory_(malloc(size_t(bytes) + 64)) {}
    ~Buffer() { free(memory_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    template <class T>
    T* data() const {
        return memory_ ? reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory_) + 63) & ~uintptr_t(63)) : nullptr;
    }
};

// Copies of a row's last, partial unit and of scales that have to be looked up.
struct Unit {
    uint8_t codes[UNIT];
    float scale[4];
};

template <int Kind>
QK_INLINE void look_up(const Row& row, int64_t u, const Shape& shape, float* scale) {
    const int64_t last = (shape.columns - 1) / shape.block_columns;
    for (int i = 0; i < 4; ++i) {
        const int64_t block = (u * UNIT + 32 * i) / shape.block_columns;
        memcpy(scale + i, row.scale + 4 * (block < last ? block : last), 4);
    }
}

// Unit u of a row; whether it is whole is known to the caller.
template <int Kind>
QK_INLINE Row whole_unit(const Row& row, int64_t u, const Shape& shape, Unit& copy) {
    const uint8_t* codes = row.codes + u * unit_bytes(Kind);
    if constexpr (Kind == FP8_ANY) {
        look_up<Kind>(row, u, shape, copy.scale);
        return Row{codes, reinterpret_cast<const uint8_t*>(copy.scale)};
    } else {
        return Row{codes, row.scale + u * scale_bytes(Kind)};
    }
}
template <int Kind>
inline Row partial_unit(const Row& row, const Shape& shape, Unit& copy) {
    const Row unit = whole_unit<Kind>(row, shape.whole, shape, copy);
    const size_t n = size_t(shape.columns - shape.whole * UNIT);
    memset(copy.codes, 0, sizeof copy.codes);
    memcpy(copy.codes, unit.codes, is_int4(Kind) ? n / 2 : n);
    if constexpr (is_int4(Kind)) {
        memset(copy.scale, 0, sizeof copy.scale);
        memcpy(copy.scale, unit.scale, n / size_t(shape.block_columns) * 2);
    } else if constexpr (Kind == FP8_128) {
        memcpy(copy.scale, unit.scale, 4);
    }
    return Row{copy.codes, reinterpret_cast<const uint8_t*>(copy.scale)};
}

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

// Writes a tile's totals for one activation row, as far as the rows are there.
QK_INLINE void finish(Total total, int there, float* out) {
    float values[TILE];
    A::finish(total, values);
    if (there >= TILE)
        memcpy(out, values, sizeof values);
    else
        memcpy(out, values, size_t(there) * sizeof *values);
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

// Most weight rows that `product` takes with n activation rows.
QK_INLINE int widest(int64_t n) { return n > DIRECT ? OUTPUTS : WIDE; }

// scratch.result[r * count + o] = weight row o times activation row r, r < n; 0 < n <= CHUNK_ROWS, count <= widest(n).
template <int Kind>
void product(int n, const Shape& shape, Scratch& scratch) {
    const Rows& rows = scratch.rows;
    if (n > DIRECT) return panels<Kind>(rows, n, shape, scratch, scratch.result);
    for (int r = 0; r < n; r += 4) {
        const Act* const* x = scratch.x + r;
        float* out = scratch.result + r * rows.count;
        switch (n - r) {
            case 1: direct<Kind, 1>(rows, x, shape, out, rows.count); break;
            case 2: direct<Kind, 2>(rows, x, shape, out, rows.count); break;
            case 3: direct<Kind, 3>(rows, x, shape, out, rows.count); break;
            default: direct<Kind, 4>(rows, x, shape, out, rows.count);
        }
    }
}

template <int Kind>
void arrange_row(const uint16_t* x, const Shape& shape, Act* out) {
    for (int64_t u = 0; u < shape.units; ++u) {
        const int64_t left = shape.columns - u * UNIT;
        A::arrange<Kind>(x + u * UNIT, int(left < UNIT ? left : UNIT), out + u * UNIT);
    }
}

void store_bf16(const float* in, int64_t n, uint16_t* out) {
    for (int64_t i = 0; i < n; i += W) {
        vf x{};
        const size_t lanes = size_t(n - i < W ? n - i : W);
        memcpy(&x, in + i, lanes * sizeof *in);
        const vh rounded = to_halves(bf16_of(x));
        memcpy(out + i, &rounded, lanes * sizeof *out);
    }
}

QK_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls run(kind) with the kind of a format as a constant.
template <class Run>
int with_kind(const QkFormat& format, const Run& run) {
    if (!format.is_int4) return format.block_columns == 128 ? run.template as<FP8_128>() : run.template as<FP8_ANY>();
    switch (format.block_columns) {
        case 32: return run.template as<INT4_32>();
        case 64: return run.template as<INT4_64>();
        default: return run.template as<INT4_128>();
    }
}

Matrix matrix(const QkFormat& format, const void* codes, int64_t stride, const void* scale, int64_t scale_stride) {
    const int64_t code_bytes = format.is_int4 ? 4 : 1, scale_bytes = format.is_int4 ? 2 : 4;
    return Matrix{static_cast<const uint8_t*>(codes), stride * code_bytes, static_cast<const uint8_t*>(scale),
                  scale_stride * scale_bytes, format.block_rows};
}

}  // namespace

#include "matmul_calls.h"
