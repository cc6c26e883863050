// Linears and experts in tasks for threads. Part of matmul_impl.h.
namespace {

// Outputs that a task takes: many, for they are read in one stream, but enough tasks to keep all threads busy.
int width_for(int64_t outputs, int most, int threads) {
    int width = most;
    while (width > OUTPUTS && outputs < int64_t(width) * 8 * threads) width /= 2;
    return width;
}

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
        const int width = width_for(call.outputs, widest(call.rows), threads);
        const int64_t tiles = (call.outputs + width - 1) / width;
        const int64_t chunks = (call.rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
        qk_for_each_on(threads, tiles * chunks, 1, [&](int64_t i, int thread) {
            const int64_t output = i / chunks * width;
            Scratch& mine = scratch[thread];
            mine.rows.count = mine.rows.known = int(smaller(width, call.outputs - output));
            mine.rows.next = OUTPUTS * weight.stride, mine.rows.next_scale = OUTPUTS * weight.scale_stride;
            weight.rows(output, mine.rows.count, mine.rows.row);
            tile<Kind>(shape, x, output, i % chunks * CHUNK_ROWS, mine);
        });
        return QK_OK;
    }

    template <int Kind>
    void tile(const Shape& shape, const Act* x, int64_t output, int64_t row, Scratch& scratch) const {
        const int count = scratch.rows.count, n = int(smaller(CHUNK_ROWS, call.rows - row));
        for (int r = 0; r < n; ++r) scratch.x[r] = x + (row + r) * shape.padded();
        product<Kind>(n, shape, scratch);
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
        const int width = width_for(call.hidden, WIDE, threads);
        const Buffer sums(threads * call.tokens * width * int64_t(sizeof(float)));
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
        qk_for_each_on(threads, (call.hidden + width - 1) / width, 1, [&](int64_t i, int thread) {
            const int count = int(smaller(width, call.hidden - i * width));
            down<Kind>(i * width, count, inner, h, sum + thread * call.tokens * width, scratch[thread]);
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
        Rows& rows = scratch.rows;
        for (int64_t p = routing.first[active]; p < routing.first[active + 1]; p += CHUNK_ROWS) {
            const int n = int(smaller(CHUNK_ROWS, routing.first[active + 1] - p)), step = widest(n) / 2;
            for (int r = 0; r < n; ++r) scratch.x[r] = x + routing.pairs[p + r] / call.top * outer.padded();
            for (int start = 0; start < width; start += step) {
                const int count = int(smaller(step, width - start));
                rows.count = rows.known = 2 * count;
                rows.next = step * gate.stride, rows.next_scale = step * gate.scale_stride;
                gate.rows(unit * UNIT + start, count, rows.row);
                up.rows(unit * UNIT + start, count, rows.row + count);
                product<Kind>(n, outer, scratch);
                for (int r = 0; r < n; ++r) {
                    const float* values = scratch.result + r * 2 * count;
                    swiglu(values, values + count, count, scratch.natural[r] + start);
                }
            }
            for (int r = 0; r < n; ++r)
                A::arrange<Kind>(scratch.natural[r], width, h + (p + r) * inner.padded() + unit * UNIT);
        }
    }

    // `width` columns of the result from `output` on, from the experts in ascending order.
    template <int Kind>
    void down(int64_t output, int width, const Shape& inner, const Act* h, float* sum, Scratch& scratch) const {
        memset(sum, 0, size_t(call.tokens * width) * sizeof *sum);
        for (int64_t active = 0; active < routing.active; ++active) {
            for (int64_t p = routing.first[active]; p < routing.first[active + 1]; p += CHUNK_ROWS) {
                const int n = int(smaller(CHUNK_ROWS, routing.first[active + 1] - p)), step = widest(n);
                for (int r = 0; r < n; ++r) scratch.x[r] = h + (p + r) * inner.padded();
                for (int start = 0; start < width; start += step) {
                    down_rows(active, output + start, int(smaller(step, width - start)), scratch.rows);
                    product<Kind>(n, inner, scratch);
                    add(scratch, routing.pairs + p, n, sum + start, width);
                }
            }
        }
        for (int64_t t = 0; t < call.tokens; ++t)
            store_bf16(sum + t * width, width, call.out + t * call.hidden + output);
    }

    // Those of an expert, and the first of the next expert.
    void down_rows(int64_t active, int64_t output, int count, Rows& rows) const {
        const Matrix weight = tensor(active, 2);
        weight.rows(output, count, rows.row);
        rows.count = rows.known = count;
        rows.next = OUTPUTS * weight.stride, rows.next_scale = OUTPUTS * weight.scale_stride;
        if (active + 1 == routing.active) return;
        const int more = count < BEYOND ? count : BEYOND;
        tensor(active + 1, 2).rows(output, more, rows.row + count);
        rows.known += more;
    }

    // sum[token of pair r] += weight of pair r * result of row r.
    void add(const Scratch& scratch, const int32_t* pairs, int n, float* sum, int width) const {
        const int count = scratch.rows.count;
        for (int r = 0; r < n; ++r) {
            const int64_t t = pairs[r] / call.top, k = pairs[r] % call.top;
            float* total = sum + t * width;
            const float weight = call.weights[t * call.weights_stride + k * call.weights_step];
            const float* result = scratch.result + r * count;
            for (int o = 0; o < count; ++o) total[o] += weight * result[o];
        }
    }
};

int linear(const QkLinear* call, int threads) { return with_kind(call->format, Linear{*call, threads}); }

int experts(const QkExperts* call, const QkRouting* routing, int threads) {
    return with_kind(call->format, ExpertsCall{*call, *routing, threads});
}

}  // namespace
