// Linears over bf16 weights, in tasks for threads. Part of matmul_impl.h.
namespace {

struct PlainLinear {
    const QkPlainLinear& call;
    int threads;

    int run() const {
        const Shape shape(call.inputs, UNIT);
        const Buffer arranged(call.batches * call.rows * shape.padded() * int64_t(sizeof(Act)));
        const Buffer memory(threads * int64_t(sizeof(Scratch)));
        Act* x = arranged.data<Act>();
        Scratch* scratch = memory.data<Scratch>();
        if (!x || !scratch) return QK_NO_MEMORY;
        const int64_t all = call.batches * call.rows;
        qk_for_each(all > DIRECT ? threads : 1, all, 8, [&](int64_t i) {
            const uint16_t* row = call.x + i / call.rows * call.x_batch + i % call.rows * call.x_stride;
            arrange_row<PLAIN>(row, shape, x + i * shape.padded());
        });
        const int width = width_for(call.batches * call.outputs, widest(call.rows), threads);
        const int64_t tiles = (call.outputs + width - 1) / width;
        const int64_t chunks = (call.rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
        qk_for_each_on(threads, call.batches * tiles * chunks, 1, [&](int64_t i, int thread) {
            const int64_t batch = i / (tiles * chunks), output = i / chunks % tiles * width;
            tile(shape, x, batch, output, int(smaller(width, call.outputs - output)), i % chunks * CHUNK_ROWS,
                 scratch[thread]);
        });
        return QK_OK;
    }

    void tile(const Shape& shape, const Act* x, int64_t batch, int64_t output, int count, int64_t row,
              Scratch& scratch) const {
        const uint8_t* codes = reinterpret_cast<const uint8_t*>(call.weight + batch * call.weight_batch);
        const Matrix weight{codes, 2 * call.stride, codes, 0, 1};  // scales are never read
        Rows& rows = scratch.rows;
        rows.count = rows.known = count;
        rows.next = OUTPUTS * weight.stride, rows.next_scale = 0;
        weight.rows(output, count, rows.row);
        const int n = int(smaller(CHUNK_ROWS, call.rows - row));
        for (int r = 0; r < n; ++r) scratch.x[r] = x + (batch * call.rows + row + r) * shape.padded();
        product<PLAIN>(n, shape, scratch);
        for (int r = 0; r < n; ++r) {
            const int64_t at = batch * call.out_batch + (row + r) * call.out_stride + output;
            const float* values = scratch.result + r * count;
            if (call.is_float)
                memcpy(static_cast<float*>(call.out) + at, values, size_t(count) * sizeof *values);
            else
                store_bf16(values, count, static_cast<uint16_t*>(call.out) + at);
        }
    }
};

int plain(const QkPlainLinear* call, int threads) { return PlainLinear{*call, threads}.run(); }

}  // namespace
