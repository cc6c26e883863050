// Linears and experts in tasks for threads. Part of matmul_impl.h.
namespace {

struct Linear {
    const QkLinear& call;
    int threads;

    template <int Kind>
    int as() const {
        const Shape shape(call.inputs, call.format.block_columns);
        const Buffer arranged(call.rows * shape.padded() * int64_t(sizeof(Act)));
        const Buffer memory(threads * int64_t(sizeof(Scratch)));
        Act* x = arranged.data<Act>();
        Scratch* scratch = memory.data<Scratch>();
        if (!x || !scratch) return QK_NO_MEMORY;
        qk_for_each(call.rows > DIRECT ? threads : 1, call.rows, 8, [&](int64_t r) {
            arrange_row<Kind>(call.x + r * call.x_stride, shape, x + r * shape.padded());
        });
        const Matrix weight = matrix(call.format, call.codes, call.stride, call.scale, call.scale_stride);
        const int64_t tiles = (call.outputs + OUTPUTS - 1) / OUTPUTS;
        const int64_t chunks = (call.rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
        qk_for_each_on(threads, tiles * chunks, 1, [&](int64_t i, int thread) {
            tile<Kind>(weight, shape, x, i / chunks * OUTPUTS, i % chunks * CHUNK_ROWS, scratch[thread]);
        });
        return QK_OK;
    }

    template <int Kind>
    void tile(const Matrix& weight, const Shape& shape, const Act* x, int64_t output, int64_t row,
              Scratch& scratch) const {
        const int count = int(smaller(OUTPUTS, call.outputs - output));
        const int n = int(smaller(CHUNK_ROWS, call.rows - row));
        Row rows[OUTPUTS];
        for (int o = 0; o < count; ++o) rows[o] = weight.row(output + o);
        for (int r = 0; r < n; ++r) scratch.rows[r] = x + (row + r) * shape.padded();
        product<Kind>(rows, count, n, shape, scratch, scratch.result);
        for (int r = 0; r < n; ++r)
            store_bf16(scratch.result + r * count, count, call.out + (row + r) * call.outputs + output);
    }
};

// e^x for x <= 88 (relative error below 2^-22; 0 stands for less than 2^-125), for numbers that are not NaN.
QK_INLINE vf exponential(vf x) {
    const vf rounder = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    x = maxf(x, splat(-87.0f));
    const vf n = (x * 1.44269504f + rounder) - rounder;
    const vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vf p = r * (1.0f / 5040) + (1.0f / 720);
    p = p * r + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    return p * number((__builtin_convertvector(n, vi) + 127) << 23);
}

// bf16(silu(gate) * up).
void swiglu(const float* gate, const float* up, int n, uint16_t* out) {
    for (int i = 0; i < n; i += W) {
        vf g{}, u{};
        const size_t lanes = size_t(n - i < W ? n - i : W);
        memcpy(&g, gate + i, lanes * 4);
        memcpy(&u, up + i, lanes * 4);
        const vf h = g / (exponential(minf(-g, splat(88.0f))) + 1.0f) * u;
        const vh rounded = to_halves(bf16_of(h));
        memcpy(out + i, &rounded, lanes * 2);
    }
}

struct ExpertsCall {
    const QkExperts& call;
    const QkRouting& routing;
    int threads;

    template <int Kind>
    int as() const {
        const Shape outer(call.hidden, call.format.block_columns), inner(call.inner, call.format.block_columns);
        const int64_t pairs = routing.first[routing.active];
        const Buffer arranged(call.tokens * outer.padded() * int64_t(sizeof(Act)));
        const Buffer between(pairs * inner.padded() * int64_t(sizeof(Act)));
        const Buffer memory(threads * int64_t(sizeof(Scratch)));
        const Buffer sums(threads * call.tokens * OUTPUTS * int64_t(sizeof(float)));
        Act *x = arranged.data<Act>(), *h = between.data<Act>();
        Scratch* scratch = memory.data<Scratch>();
        float* sum = sums.data<float>();
        if (!x || !h || !scratch || !sum) return QK_NO_MEMORY;
        qk_for_each(call.tokens > DIRECT ? threads : 1, call.tokens, 8, [&](int64_t t) {
            arrange_row<Kind>(call.x + t * call.x_stride, outer, x + t * outer.padded());
        });
        qk_for_each_on(threads, routing.active * inner.units, 1, [&](int64_t i, int thread) {
            gate_up<Kind>(i / inner.units, i % inner.units, outer, inner, x, h, scratch[thread]);
        });
        qk_for_each_on(threads, (call.hidden + OUTPUTS - 1) / OUTPUTS, 1, [&](int64_t i, int thread) {
            down<Kind>(i * OUTPUTS, inner, h, sum + thread * call.tokens * OUTPUTS, scratch[thread]);
        });
        return QK_OK;
    }

    // Tensor 0 (gate), 1 (up) or 2 (down) of an active expert.
    Matrix tensor(int64_t active, int which) const {
        const int64_t at = 6 * routing.expert[active] + 2 * which;
        const auto address = [&](int64_t i) { return reinterpret_cast<const void*>(uintptr_t(call.pointers[i])); };
        return matrix(call.format, address(at), call.strides[at], address(at + 1), call.strides[at + 1]);
    }

    // h of one expert's tokens in the columns of one unit.
    template <int Kind>
    void gate_up(int64_t active, int64_t unit, const Shape& outer, const Shape& inner, const Act* x, Act* h,
                 Scratch& scratch) const {
        const Matrix gate = tensor(active, 0), up = tensor(active, 1);
        const int width = int(smaller(UNIT, call.inner - unit * UNIT));
        for (int64_t p = routing.first[active]; p < routing.first[active + 1]; p += CHUNK_ROWS) {
            const int n = int(smaller(CHUNK_ROWS, routing.first[active + 1] - p));
            for (int r = 0; r < n; ++r) scratch.rows[r] = x + routing.pairs[p + r] / call.top * outer.padded();
            for (int start = 0; start < width; start += OUTPUTS / 2) {
                const int count = int(smaller(OUTPUTS / 2, width - start));
                Row rows[OUTPUTS];
                for (int o = 0; o < count; ++o) {
                    rows[o] = gate.row(unit * UNIT + start + o);
                    rows[count + o] = up.row(unit * UNIT + start + o);
                }
                product<Kind>(rows, 2 * count, n, outer, scratch, scratch.result);
                for (int r = 0; r < n; ++r) {
                    const float* values = scratch.result + r * 2 * count;
                    swiglu(values, values + count, count, scratch.natural[r] + start);
                }
            }
            for (int r = 0; r < n; ++r)
                A::arrange<Kind>(scratch.natural[r], width, h + (p + r) * inner.padded() + unit * UNIT);
        }
    }

    // OUTPUTS columns of the result, from the experts in ascending order.
    template <int Kind>
    void down(int64_t output, const Shape& inner, const Act* h, float* sum, Scratch& scratch) const {
        const int count = int(smaller(OUTPUTS, call.hidden - output));
        memset(sum, 0, size_t(call.tokens * count) * sizeof *sum);
        for (int64_t active = 0; active < routing.active; ++active) {
            const Matrix weight = tensor(active, 2);
            Row rows[OUTPUTS];
            for (int o = 0; o < count; ++o) rows[o] = weight.row(output + o);
            for (int64_t p = routing.first[active]; p < routing.first[active + 1]; p += CHUNK_ROWS) {
                const int n = int(smaller(CHUNK_ROWS, routing.first[active + 1] - p));
                for (int r = 0; r < n; ++r) scratch.rows[r] = h + (p + r) * inner.padded();
                product<Kind>(rows, count, n, inner, scratch, scratch.result);
                for (int r = 0; r < n; ++r) {
                    const int32_t pair = routing.pairs[p + r];
                    float* total = sum + pair / call.top * count;
                    for (int o = 0; o < count; ++o) total[o] += call.weights[pair] * scratch.result[r * count + o];
                }
            }
        }
        for (int64_t t = 0; t < call.tokens; ++t)
            store_bf16(sum + t * count, count, call.out + t * call.hidden + output);
    }
};

int linear(const QkLinear* call, int threads) { return with_kind(call->format, Linear{*call, threads}); }

int experts(const QkExperts* call, const QkRouting* routing, int threads) {
    return with_kind(call->format, ExpertsCall{*call, *routing, threads});
}

const QkMatmulOps OPS = {linear, experts};

}  // namespace
