// Attention over pages: tiles of keys and values are decoded once and used by up to 64 rows (query, head).
//
// A row's sums follow the tokens' positions in tiles of 64 and, when decoding or sparse, in chunks of 512 whose
// parts are merged in order. Neither depends on the other rows, the batch or the threads: always the same bits.
// Keys lie transposed in a tile, a token in each lane, so a score needs no sum across lanes and the scales of
// tokens are vectors; values lie a column in each lane.
#include "attention_read.h"

namespace {

struct Attention : Reader {
    struct Scores {
        const Element *query, *keys;
        int64_t stride, steps;
        const float* scale;
        float* scores;
        bool is_first;
        template <int R>
        QK_INLINE void run(int row) const {
            Arithmetic::scores<R>(query + row * stride, stride, keys, steps, scale, scores + row * TILE, is_first);
        }
    };

    void score_tile(const Memory& m, int rows) const {
        const int64_t width = call.is_latent ? call.key.columns : 128;
        for (int64_t c = 0; c < shape.key_columns; c += width) {
            const int64_t columns = smaller(width, shape.key_columns - c);
            const int64_t steps = (columns + Arithmetic::PACK - 1) / Arithmetic::PACK;
            const float* scale = m.key_scales + (call.is_latent ? c / width : 0) * TILE;
            row_runs(rows, Arithmetic::RUN,
                     Scores{m.query + c, m.keys + c * TILE, shape.key_width, steps, scale, m.scores, c == 0});
        }
    }

    // show(t, x, hidden): x for the tokens from t on that are seen, hidden for the others.
    template <class Step>
    QK_INLINE void with_seen(int64_t seen, const Step& step) const {
        if (seen >= TILE)
            step([](int, vf x, vf) QK_LAMBDA { return x; });
        else
            step([seen](int t, vf x, vf hidden) QK_LAMBDA {
                return lane_numbers() + t < splati(int32_t(seen < 0 ? 0 : seen)) ? x : hidden;
            });
    }

    // Scores of a tile's first n tokens to softmax numerators times the scale of the values. Three loops over the
    // rows, because one row alone is a long chain of operations that wait for each other.
    void weights(const Block& block, const Memory& m, int64_t tile, int n) const {
        const int rows = block.rows();
        float bases[ROWS];
        for (int row = 0; row < rows; ++row)
            with_seen(smaller(n, tokens_of(block, row) - tile), [&](const auto& show) QK_LAMBDA {
                float* s = m.scores + row * TILE;
                vf most = splat(LOWEST);
                for (int t = 0; t < TILE; t += W) {
                    const vf x = show(t, load<vf>(s + t) * splat(call.scale), splat(LOWEST));
                    most = most > x ? most : x;
                    store(s + t, x);
                }
                const float before = m.largest[row], here = max_lanes(most);
                bases[row] = before > here ? before : here;
            });
        for (int row = 0; row < rows; row += W) {
            const int lanes = int(smaller(W, rows - row));
            const vf largest = load_some<vf>(bases + row, lanes), before = load_some<vf>(m.largest + row, lanes);
            const vf base = largest == splat(LOWEST) ? vf{} : largest;
            const vf factor = exponential(before - base);
            store_some(m.factors + row, factor, lanes);
            store_some(m.total + row, load_some<vf>(m.total + row, lanes) * factor, lanes);
            store_some(m.largest + row, largest, lanes);
            store_some(bases + row, base, lanes);
        }
        for (int row = 0; row < rows; ++row)
            with_seen(smaller(n, tokens_of(block, row) - tile), [&](const auto& show) QK_LAMBDA {
                const float* s = m.scores + row * TILE;
                Element* p = m.p + row * shape.scales * TILE;
                vf sum{};
                for (int t = 0; t < TILE; t += W) {
                    const vf e = show(t, exponential(load<vf>(s + t) - splat(bases[row])), vf{});
                    sum += e;
                    for (int b = 0; b < shape.scales; ++b) {
                        const vf scale = load<vf>(m.value_scales + b * TILE + t);
                        Arithmetic::put(p + b * TILE + t, show(t, e * scale, vf{}));
                    }
                }
                m.total[row] += sum_lanes(sum);
            });
    }

    struct Weigh {
        const Element *p, *values;
        int64_t stride, width, columns, steps;
        const float* factors;
        float* sums;
        template <int R>
        QK_INLINE void run(int row) const {
            Arithmetic::weigh<R>(p + row * stride, stride, values, width, columns, steps, factors + row,
                                 sums + row * width);
        }
    };

    void weigh_tile(const Memory& m, int first, int rows, int n) const {
        const int64_t width = shape.value_width, stride = int64_t(shape.scales) * TILE;
        const int64_t steps = (n + Arithmetic::PACK - 1) / Arithmetic::PACK;
        for (int64_t c = 0; c < width; c += 64) {
            const Element* p = m.p + first * stride + (call.is_latent ? c / call.key.columns : 0) * TILE;
            const Element* values = m.values + c * Arithmetic::PACK;
            float* sums = m.sums + first * width + c;
            row_runs(rows, Arithmetic::RUN, Weigh{p, values, stride, width, 64, steps, m.factors + first, sums});
        }
    }

    // The same where a row must not meet, even with a weight of zero, what it does not see.
    void weigh_ragged(const Block& block, const Memory& m, int64_t first, int n) const {
        constexpr int64_t PACK = Arithmetic::PACK;
        const int64_t width = shape.value_width;
        int64_t t = n;  // values from here on are zeros
        for (int row = block.rows() - 1; row >= 0; --row) {
            const int64_t seen = tokens_of(block, row) - first;
            while (t > 0 && t > seen) {
                --t;
                for (int64_t c = 0; c < width; ++c) m.values[(t / PACK * width + c) * PACK + t % PACK] = 0;
            }
            weigh_tile(m, row, 1, n);
        }
    }

    int64_t tokens_of(const Block& block, int row) const {
        if (!shape.is_ragged) return block.tokens;
        return block.history + block.first_query - call.starts[block.request] + row / block.heads + 1;
    }

    void load_queries(const Block& block, const Memory& m) const {
        memset(m.query, 0, size_t(block.rows() * shape.key_width) * sizeof(Element));
        memset(m.key_rows, 0, size_t(GROUP * shape.key_width) * sizeof(Element));  // zeros behind the last column
        memset(m.value_rows, 0, size_t(GROUP * shape.value_width) * sizeof(Element));
        for (int row = 0; row < block.rows(); ++row) {
            const int64_t token = block.first_query + row / block.heads;
            const int64_t head = block.kv_head * shape.group + block.first_head + row % block.heads;
            Element* to = m.query + row * shape.key_width;
            const int64_t first = call.is_latent ? shape.value_columns : shape.key_columns;
            Arithmetic::copy(row_at(call.query, token, head), first, to);
            if (!call.is_latent) continue;
            Arithmetic::copy(row_at(call.query_rope, token, head), call.value.columns, to + first);
        }
    }

    // Tokens [first, last) of a block into sums, largest and total.
    void attend(const Block& block, const Memory& m, int64_t first, int64_t last) const {
        const int rows = block.rows();
        memset(m.sums, 0, size_t(rows * shape.value_width) * 4);
        for (int row = 0; row < rows; ++row) m.largest[row] = LOWEST, m.total[row] = 0;
        for (int64_t tile = first; tile < last; tile += TILE) {
            const int n = int(smaller(TILE, last - tile));
            read_tile(block, m, tile, n);
            score_tile(m, rows);
            weights(block, m, tile, n);
            const bool is_ragged = shape.is_ragged && tokens_of(block, 0) - tile < n;
            if (is_ragged && !Arithmetic::is_finite(m.values, round_up(n, GROUP) * shape.value_width))
                weigh_ragged(block, m, tile, n);
            else
                weigh_tile(m, 0, rows, n);
        }
    }

    // Chunk results onto those of the chunks before.
    void merge(const Memory& m, int rows, bool is_first, const float* sums, const float* largest,
               const float* total) const {
        const int64_t width = shape.value_width;
        for (int row = 0; row < rows; ++row) {
            float* to = m.all_sums + row * width;
            if (is_first) {
                memcpy(to, sums + row * width, size_t(width) * 4);
                m.all_largest[row] = largest[row], m.all_total[row] = total[row];
                continue;
            }
            const float before = m.all_largest[row], now = largest[row];
            const float most = before > now ? before : now, base = reference(most);
            const float a = exponential(before - base), b = exponential(now - base);
            for (int64_t c = 0; c < width; c += W)
                store(to + c, load<vf>(to + c) * splat(a) + load<vf>(sums + row * width + c) * splat(b));
            m.all_total[row] = m.all_total[row] * a + total[row] * b;
            m.all_largest[row] = most;
        }
    }

    void finish(const Block& block, const float* sums, const float* total) const {
        for (int row = 0; row < block.rows(); ++row) {
            const int64_t token = block.first_query + row / block.heads;
            const int64_t head = block.kv_head * shape.group + block.first_head + row % block.heads;
            uint16_t* out = call.out + (token * call.heads + head) * shape.value_columns;
            if (!block.tokens) {  // sums may hold anything then, of another block too, and NaN times 0 is NaN
                memset(out, 0, size_t(shape.value_columns) * sizeof(uint16_t));
                continue;
            }
            const float factor = 1.0f / total[row];
            const float* from = sums + row * shape.value_width;
            vectors(shape.value_columns, [&](int64_t c, int lanes) QK_LAMBDA {
                store_some(out + c, to_halves(bf16_of(load_some<vf>(from + c, lanes) * splat(factor))), lanes);
            });
        }
    }
};

}  // namespace

#include "attention_calls.h"
