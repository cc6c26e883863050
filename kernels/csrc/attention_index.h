// Scores of the DSA indexer: sum over heads of weight * relu(query . key). Part of attention_impl.h.

namespace {

constexpr int64_t SPAN = 512;  // keys that a thread takes at a time
constexpr int64_t AHEAD = 32;  // tokens

struct HeadScores {
    const Element *query, *keys;
    int64_t stride, steps;
    const float* scale;
    float* scores;
    template <int R>
    QK_INLINE void run(int row) const {
        Arithmetic::scores<R>(query + row * stride, stride, keys, steps, scale, scores + row * TILE, true);
    }
};

struct IndexMemory {
    Element *query, *key_rows, *keys;
    float *scales, *scores;
    IndexMemory(int64_t heads, int64_t columns, Arena& arena) {
        query = arena.take<Element>(heads * columns);
        key_rows = arena.take<Element>(GROUP * columns);
        keys = arena.take<Element>(TILE * columns);
        scales = arena.take<float>(TILE);
        scores = arena.take<float>(heads * TILE);
    }
};

// Keys [first, first + n) of a token's row, transposed, and their scales.
void read_keys(const QkIndexScores& call, const IndexMemory& m, int64_t row, int64_t first, int n) {
    const int64_t columns = call.key.columns;
    const int32_t* table = call.table + row * call.table_stride;
    for (int t = 0; t < n; t += GROUP) {
        for (int i = 0; i < GROUP; ++i) {
            m.scales[t + i] = 0;
            if (t + i >= n) continue;
            const Place at = place_of(call.pool, table, first + t + i);
            const uint8_t* key = run_at(call.key, at.page, 0, at.offset);
            prefetch(key + AHEAD * call.key.token_stride, call.key.token_stride);  // in this page, or nowhere
            read_run(call.key, key, columns, m.key_rows + i * columns);
            m.scales[t + i] = scale_at(call.key, at.page, 0, at.offset);
        }
        Arithmetic::transpose(m.key_rows, columns, columns, m.keys + t * Arithmetic::PACK);
    }
}

void score_span(const QkIndexScores& call, int64_t token, int64_t first, int64_t last, const IndexMemory& m) {
    const int64_t columns = call.key.columns;
    const float* weights = call.weights + token * call.heads;
    for (int64_t h = 0; h < call.heads; ++h)
        Arithmetic::copy(row_at(call.query, token, h), columns, m.query + h * columns);
    for (int64_t tile = first; tile < last; tile += TILE) {
        const int n = int(smaller(TILE, last - tile));
        read_keys(call, m, call.rows[token], tile, n);
        row_runs(int(call.heads), Arithmetic::RUN,
                 HeadScores{m.query, m.keys, columns, columns / Arithmetic::PACK, m.scales, m.scores});
        float* out = call.out + token * call.longest + tile;
        for (int t = 0; t < n; t += W) {
            vf sum{};
            for (int64_t h = 0; h < call.heads; ++h) {
                const vf x = load<vf>(m.scores + h * TILE + t);
                sum += splat(weights[h]) * (x < vf{} ? vf{} : x);  // NaN stays
            }
            store_some(out + t, sum, int(smaller(W, n - t)));
        }
    }
}

int index_scores(const QkIndexScores* call, int threads) {
    Arena counting{nullptr, 0};
    IndexMemory(call->heads, call->key.columns, counting);
    const int64_t spans = (call->longest + SPAN - 1) / SPAN;
    return for_each_with_memory(threads, call->tokens * spans, counting.used, [&](int64_t i, char* memory) {
        Arena arena{memory, 0};
        const IndexMemory m(call->heads, call->key.columns, arena);
        const int64_t token = i / spans, first = i % spans * SPAN, length = call->lengths[token];
        const int64_t end = smaller(first + SPAN, call->longest), last = smaller(end, length);
        if (first < last) score_span(*call, token, first, last, m);
        float* out = call->out + token * call->longest;
        for (int64_t k = first > length ? first : length; k < end; ++k) out[k] = LOWEST;
    });
}

const QkAttentionOps OPS = {attention, index_scores};

}  // namespace
