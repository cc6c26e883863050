// Blocks of rows that share keys and values, and how those get from pages into tiles. Part of attention_impl.h.

namespace {

typedef Arithmetic::Element Element;

struct Shape {
    int64_t key_columns, key_width;      // padded to 64
    int64_t value_columns, value_width;  // padded to 64
    int scales;                          // of a token's values
    int64_t group;                       // query heads of a key-value head
    bool is_ragged;                      // rows of a block may see different numbers of tokens

    explicit Shape(const QkAttention& call) {
        const bool is_latent = call.is_latent;
        value_columns = is_latent ? call.key.groups * call.key.columns : call.value.columns;
        key_columns = is_latent ? value_columns + call.value.columns : call.key.columns;
        key_width = round_up(key_columns, 64), value_width = round_up(value_columns, 64);
        scales = is_latent ? int(call.key.groups) : 1;
        group = is_latent ? call.heads : call.heads / call.key.groups;
        is_ragged = call.is_prefill && !call.indices;
    }
};

// Rows that share keys and values: `queries` times `heads`, query by query.
struct Block {
    int64_t request, first_query, kv_head, first_head;
    int queries, heads;
    int64_t history;         // tokens before the chunk, when prefilling
    int64_t first_fresh;     // position from which keys are fresh
    const int32_t* chosen;   // positions, or null
    int64_t tokens;          // that the last row sees

    int rows() const { return queries * heads; }
};

// What a block needs in memory.
struct Memory {
    Element *query, *key_rows, *value_rows, *keys, *values, *p;
    float *key_scales, *value_scales, *scores, *factors;
    float *sums, *largest, *total;              // of the running chunk
    float *all_sums, *all_largest, *all_total;  // of the chunks before
    int32_t* chosen;

    Memory(const Shape& shape, int64_t num_indices, Arena& arena) {
        query = arena.take<Element>(ROWS * shape.key_width);
        key_rows = arena.take<Element>(GROUP * shape.key_width);
        value_rows = arena.take<Element>(GROUP * shape.value_width);
        keys = arena.take<Element>(TILE * shape.key_width);
        values = arena.take<Element>(TILE * shape.value_width);
        p = arena.take<Element>(ROWS * shape.scales * TILE);
        key_scales = arena.take<float>((shape.scales + 1) * TILE);
        value_scales = arena.take<float>(shape.scales * TILE);
        scores = arena.take<float>(ROWS * TILE);
        factors = arena.take<float>(ROWS);
        sums = arena.take<float>(ROWS * shape.value_width), largest = arena.take<float>(ROWS);
        total = arena.take<float>(ROWS);
        all_sums = arena.take<float>(ROWS * shape.value_width), all_largest = arena.take<float>(ROWS);
        all_total = arena.take<float>(ROWS);
        chosen = arena.take<int32_t>(num_indices);
    }
    static size_t bytes(const Shape& shape, int64_t num_indices) {
        Arena arena{nullptr, 0};
        Memory(shape, num_indices, arena);
        return arena.used;
    }
};

const uint8_t* run_at(const QkPart& part, const uint8_t* page, int64_t group, int64_t offset) {
    return page + part.start + group * part.group_stride + offset * part.token_stride;
}
float scale_at(const QkPart& part, const uint8_t* page, int64_t group, int64_t offset) {
    if (!part.is_fp8) return 1;
    const int64_t start = part.scale_start + group * part.scale_group_stride + offset * part.scale_token_stride;
    float scale;
    memcpy(&scale, page + start, 4);
    return scale;
}
void read_run(const QkPart& part, const uint8_t* from, int64_t columns, Element* to) {
    if (part.is_fp8)
        Arithmetic::decode(from, columns, to);
    else
        Arithmetic::copy(from, columns, to);
}
const uint8_t* row_at(const QkRows& rows, int64_t token, int64_t head) {
    return reinterpret_cast<const uint8_t*>(rows.data + token * rows.token_stride + head * rows.head_stride);
}

QK_INLINE void prefetch(const uint8_t* from, int64_t bytes) {
    // into the second level: measured on Zen 4, this takes a token in 30 ns, the first level 110, none 140
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

struct Place {
    const uint8_t* page;
    int64_t offset;
};

QK_INLINE Place place_of(const QkPool& pool, const int32_t* table, int64_t position) {
    const uint32_t size = uint32_t(pool.page_size), index = uint32_t(position) / size;
    return Place{pool.pages + table[index] * pool.stride, int64_t(uint32_t(position) - index * size)};
}

// Decodes keys and values of tokens into tiles.
struct Reader {
    const QkAttention& call;
    const Shape& shape;

    QK_INLINE Place place_of(const Block& block, int64_t position) const {
        return ::place_of(call.pool, call.table + block.request * call.table_stride, position);
    }

    // Token i of a block into row `slot` of the group, its scales to place t of the tile.
    void read_token(const Block& block, const Memory& m, int64_t i, int slot, int t) const {
        Element* key = m.key_rows + slot * shape.key_width;
        Element* value = m.value_rows + slot * shape.value_width;
        const int64_t position = block.chosen ? block.chosen[i] : i;
        float* scales = m.key_scales + t;
        if (position >= block.first_fresh) {
            const int64_t token = call.starts[block.request] + position - block.history;
            const uint8_t* second = row_at(call.fresh_value, token, block.kv_head);
            Arithmetic::copy(row_at(call.fresh_key, token, block.kv_head), shape.value_columns, key);
            Arithmetic::copy(second, call.value.columns, call.is_latent ? key + shape.value_columns : value);
            for (int s = 0; s <= shape.scales; ++s) scales[s * TILE] = 1;
            for (int s = 0; s < shape.scales; ++s) m.value_scales[s * TILE + t] = 1;
            return;
        }
        const Place at = place_of(block, position);
        const uint8_t* page = at.page;
        const int64_t offset = at.offset;
        const uint8_t* from = run_at(call.key, page, block.kv_head, offset);
        if (call.is_latent) {  // the runs of a latent follow one another
            read_run(call.key, from, shape.value_columns, key);
            const uint8_t* rope = run_at(call.value, page, 0, offset);
            read_run(call.value, rope, call.value.columns, key + shape.value_columns);
            for (int s = 0; s < shape.scales; ++s)
                scales[s * TILE] = m.value_scales[s * TILE + t] = scale_at(call.key, page, s, offset);
            scales[shape.scales * TILE] = 1;
        } else {
            read_run(call.key, from, shape.key_columns, key);
            read_run(call.value, run_at(call.value, page, block.kv_head, offset), shape.value_columns, value);
            scales[0] = scale_at(call.key, page, block.kv_head, offset);
            m.value_scales[t] = scale_at(call.value, page, block.kv_head, offset);
        }
    }

    // Asks for token i ahead of time: pages lie anywhere, and sparse tokens do too. Inline, or GCC takes it for a
    // pure function and drops the call.
    QK_INLINE void prefetch_token(const Block& block, int64_t i) const {
        if (i >= block.tokens) return;
        const int64_t position = block.chosen ? block.chosen[i] : i;
        if (position >= block.first_fresh) return;
        const Place at = place_of(block, position);
        const int64_t run = call.key.columns * (call.key.is_fp8 ? 1 : 2);
        const int64_t bytes = call.is_latent ? call.key.token_stride : run;
        prefetch(run_at(call.key, at.page, block.kv_head, at.offset), bytes);
        if (!call.is_latent) prefetch(run_at(call.value, at.page, block.kv_head, at.offset), bytes);
    }

    // Sixteen tokens from token i on, all in one page.
    void read_group(const Block& block, const Memory& m, int64_t i, int t) const {
        const Place at = place_of(block, i);
        const uint8_t* from = run_at(call.key, at.page, block.kv_head, at.offset);
        const uint8_t* second = run_at(call.value, at.page, call.is_latent ? 0 : block.kv_head, at.offset);
        const int64_t key_columns = call.is_latent ? shape.value_columns : shape.key_columns;
        Element* to = m.key_rows;
        Element* to_second = call.is_latent ? to + key_columns : m.value_rows;
        const int64_t stride = call.is_latent ? shape.key_width : shape.value_width;
        for (int j = 0; j < GROUP; ++j) {
            prefetch_token(block, i + j + GROUP);  // between the reads: as many at once would be dropped
            read_run(call.key, from + j * call.key.token_stride, key_columns, to + j * shape.key_width);
            read_run(call.value, second + j * call.value.token_stride, call.value.columns, to_second + j * stride);
        }
        const QkPart& scaled = call.is_latent ? call.key : call.value;
        for (int s = 0; s < shape.scales; ++s)
            for (int j = 0; j < GROUP; ++j) {
                const int64_t group = call.is_latent ? s : block.kv_head;
                m.value_scales[s * TILE + t + j] = scale_at(scaled, at.page, group, at.offset + j);
                m.key_scales[s * TILE + t + j] = scale_at(call.key, at.page, group, at.offset + j);
            }
        for (int j = 0; j < GROUP; ++j)
            if (call.is_latent) m.key_scales[shape.scales * TILE + t + j] = 1;
    }

    // Whether sixteen tokens from token i on lie in one page.
    bool is_group(const Block& block, int64_t i) const {
        const uint32_t size = uint32_t(call.pool.page_size);
        return !block.chosen && i + GROUP <= smaller(block.tokens, block.first_fresh) &&
               uint32_t(i) % size + GROUP <= size;
    }

    void read_tile(const Block& block, const Memory& m, int64_t first, int n) const {
        const Element* rows = call.is_latent ? m.key_rows : m.value_rows;
        const int64_t stride = call.is_latent ? shape.key_width : shape.value_width;
        for (int t = 0; t < n; t += GROUP) {
            const int used = n - t < GROUP ? n - t : GROUP;
            if (used == GROUP && is_group(block, first + t)) {
                read_group(block, m, first + t, t);
            } else {
                for (int i = 0; i < used; ++i) {
                    prefetch_token(block, first + t + i + GROUP);
                    read_token(block, m, first + t + i, i, t + i);
                }
            }
            for (int i = used; i < GROUP; ++i) {  // zeros, so that a weight of zero meets no NaN
                memset(m.key_rows + i * shape.key_width, 0, size_t(shape.key_width) * sizeof(Element));
                memset(m.value_rows + i * shape.value_width, 0, size_t(shape.value_width) * sizeof(Element));
                for (int s = 0; s <= shape.scales; ++s) m.key_scales[s * TILE + t + i] = 0;
                for (int s = 0; s < shape.scales; ++s) m.value_scales[s * TILE + t + i] = 0;
            }
            Arithmetic::transpose(m.key_rows, shape.key_width, shape.key_width, m.keys + t * Arithmetic::PACK);
            Arithmetic::interleave(rows, stride, shape.value_width, m.values + t * shape.value_width);
        }
    }
};

}  // namespace
