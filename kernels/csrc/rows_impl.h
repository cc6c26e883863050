// Norms and rotations, compiled once for every instruction set with the same bits: sums run in sixteen lanes, which
// are folded in one order, and nothing is contracted.
#include "rows.h"

#include <math.h>
#include <string.h>

#include "runtime.h"

namespace {

constexpr int LANES = 16;
constexpr int64_t TASK = 16384;  // elements

inline float from_bf16(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline uint16_t to_bf16(float x) {  // nearest even; a NaN stays one
    uint32_t u;
    memcpy(&u, &x, 4);
    const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return uint16_t((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : rounded);
}

float sum_of_squares(const uint16_t* x, int64_t n) {
    float lanes[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; ++l) {
            const float value = from_bf16(x[i + l]);
            lanes[l] += value * value;
        }
    for (int l = 0; i + l < n; ++l) {
        const float value = from_bf16(x[i + l]);
        lanes[l] += value * value;
    }
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    return lanes[0];
}

int64_t rows_of_a_task(int64_t columns) { return columns < TASK ? TASK / (columns < 1 ? 1 : columns) : 1; }

void norm(const QkNorm* call, int threads) {
    const int64_t n = call->columns;
    const float epsilon = float(call->epsilon);
    qk_for_each(threads, call->rows, rows_of_a_task(n), [&](int64_t r) {
        const uint16_t* x = call->x + r * call->stride;
        uint16_t* out = call->out + r * n;
        const float by = 1.0f / sqrtf(sum_of_squares(x, n) / float(n) + epsilon);
        for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(call->weight[i] * from_bf16(to_bf16(from_bf16(x[i]) * by)));
    });
}

void add(const QkAdd* call, int threads) {
    qk_for_each(threads, (call->count + TASK - 1) / TASK, 1, [&](int64_t task) {
        const int64_t first = task * TASK, last = first + TASK < call->count ? first + TASK : call->count;
        for (int64_t i = first; i < last; ++i) call->out[i] = to_bf16(from_bf16(call->a[i]) + from_bf16(call->b[i]));
    });
}

template <int Step>  // from a pair's first column to the next one's
inline void turn(const uint16_t* first, const uint16_t* second, const float* cos, const float* sin, int64_t pairs,
                 uint16_t* out) {
    for (int64_t i = 0; i < pairs; ++i) {
        const float a = from_bf16(first[i * Step]), b = from_bf16(second[i * Step]);
        out[i] = to_bf16(a * cos[i] - b * sin[i]);
        out[pairs + i] = to_bf16(b * cos[i] + a * sin[i]);
    }
}

void rotate(const QkRotate* call, int threads) {
    const int64_t n = call->columns, pairs = call->pairs;
    qk_for_each(threads, call->tokens, rows_of_a_task(call->heads * n), [&](int64_t t) {
        const float *cos = call->cos + t * call->angle_stride, *sin = call->sin + t * call->angle_stride;
        for (int64_t h = 0; h < call->heads; ++h) {
            const uint16_t* x = call->x + t * call->token_stride + h * call->head_stride;
            uint16_t* out = call->out + (t * call->heads + h) * n;
            if (call->is_interleaved)
                turn<2>(x, x + 1, cos, sin, pairs, out);
            else
                turn<1>(x, x + pairs, cos, sin, pairs, out);
            memcpy(out + 2 * pairs, x + 2 * pairs, size_t(n - 2 * pairs) * sizeof *out);
        }
    });
}

const QkRowOps OPS = {norm, add, rotate};

}  // namespace
