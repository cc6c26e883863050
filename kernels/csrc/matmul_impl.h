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
    uint8_t codes[2 * UNIT];
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
    memcpy(copy.codes, unit.codes, n * size_t(unit_bytes(Kind)) / UNIT);
    if constexpr (is_int4(Kind)) {
        memset(copy.scale, 0, sizeof copy.scale);
        memcpy(copy.scale, unit.scale, n / size_t(shape.block_columns) * 2);
    } else if constexpr (Kind == FP8_128) {
        memcpy(copy.scale, unit.scale, 4);
    }
    return Row{copy.codes, reinterpret_cast<const uint8_t*>(copy.scale)};
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

}  // namespace

#include "matmul_direct.h"
#include "matmul_panel.h"

namespace {

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
#include "matmul_plain.h"

namespace {

const QkMatmulOps OPS = {linear, experts, plain};

}  // namespace
