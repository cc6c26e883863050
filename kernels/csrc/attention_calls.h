// Which blocks of rows there are and how threads share them. Part of attention_impl.h.

namespace {

struct Plan {
    const QkAttention& call;
    const Shape& shape;
    int heads, queries;         // of a block
    int64_t blocks_of_heads;    // of a query
    int64_t chunk;

    Plan(const QkAttention& c, const Shape& s) : call(c), shape(s) {
        heads = int(smaller(shape.group, ROWS));
        queries = shape.is_ragged ? ROWS / heads : 1;
        blocks_of_heads = (shape.group + heads - 1) / heads * (call.is_latent ? 1 : call.key.groups);
        chunk = shape.is_ragged ? INT64_MAX : CHUNK;
    }
    int64_t blocks_of(int64_t request) const {
        const int64_t count = call.starts[request + 1] - call.starts[request];
        return (count + queries - 1) / queries * blocks_of_heads;
    }
    int64_t blocks() const {
        int64_t count = 0;
        for (int64_t r = 0; r < call.requests; ++r) count += blocks_of(r);
        return count;
    }

    // Block number i; `chosen` receives its positions when it is sparse.
    Block block(int64_t i, int32_t* chosen) const {
        int64_t r = 0;
        for (; i >= blocks_of(r); ++r) i -= blocks_of(r);
        const int64_t part = i % blocks_of_heads, in_group = (shape.group + heads - 1) / heads;
        Block b{};
        b.request = r;
        b.first_query = call.starts[r] + i / blocks_of_heads * queries;
        b.kv_head = part / in_group, b.first_head = part % in_group * heads;
        b.heads = int(smaller(heads, shape.group - b.first_head));
        b.queries = int(smaller(queries, call.starts[r + 1] - b.first_query));
        const int64_t length = call.lengths[r], count = call.starts[r + 1] - call.starts[r];
        b.history = call.is_prefill ? length - count : length;
        b.first_fresh = call.fresh_key.data ? b.history : INT64_MAX;
        b.tokens = call.is_prefill ? b.history + b.first_query - call.starts[r] + b.queries : length;
        if (call.indices) {
            const int32_t* from = call.indices + b.first_query * call.indices_stride;
            b.tokens = 0, b.chosen = chosen;
            for (int64_t k = 0; k < call.num_indices; ++k)
                if (from[k] >= 0) chosen[b.tokens++] = from[k];
        }
        return b;
    }
    int64_t most_chunks() const {
        int64_t most = 1;
        if (shape.is_ragged) return most;
        for (int64_t r = 0; r < call.requests; ++r) {
            const int64_t tokens = call.indices ? call.num_indices : call.lengths[r];
            const int64_t count = (tokens + chunk - 1) / chunk;
            most = count > most ? count : most;
        }
        return most;
    }
};

// A block from its first chunk to its last.
void whole_block(const Plan& plan, const Attention& attention, int64_t i, char* memory) {
    Arena arena{memory, 0};
    const Memory m(attention.shape, plan.call.num_indices, arena);
    const Block block = plan.block(i, m.chosen);
    attention.load_queries(block, m);
    if (block.tokens <= plan.chunk) {
        attention.attend(block, m, 0, block.tokens);
        attention.finish(block, m.sums, m.total);
        return;
    }
    for (int64_t first = 0; first < block.tokens; first += plan.chunk) {
        attention.attend(block, m, first, smaller(first + plan.chunk, block.tokens));
        attention.merge(m, block.rows(), first == 0, m.sums, m.largest, m.total);
    }
    attention.finish(block, m.all_sums, m.all_total);
}

// Few blocks with long contexts: their chunks are the work, and are merged in order afterwards.
int in_chunks(const Plan& plan, const Attention& attention, int64_t blocks, int64_t chunks, size_t bytes,
              int threads) {
    const int64_t width = attention.shape.value_width, size = ROWS * (width + 2);
    float* parts = static_cast<float*>(malloc(size_t(blocks * chunks * size) * sizeof(float)));
    if (!parts) return QK_NO_MEMORY;
    int status = for_each_with_memory(threads, blocks * chunks, bytes, [&](int64_t i, char* memory) {
        Arena arena{memory, 0};
        Memory m(attention.shape, plan.call.num_indices, arena);
        const Block block = plan.block(i / chunks, m.chosen);
        const int64_t first = i % chunks * plan.chunk;
        if (first >= block.tokens) return;
        float* part = parts + i * size;
        m.sums = part, m.largest = part + ROWS * width, m.total = m.largest + ROWS;
        attention.load_queries(block, m);
        attention.attend(block, m, first, smaller(first + plan.chunk, block.tokens));
    });
    if (status == QK_OK)
        status = for_each_with_memory(threads, blocks, bytes, [&](int64_t i, char* memory) {
            Arena arena{memory, 0};
            const Memory m(attention.shape, plan.call.num_indices, arena);
            const Block block = plan.block(i, m.chosen);
            const float* part = parts + i * chunks * size;
            for (int64_t first = 0; first < block.tokens; first += plan.chunk, part += size)
                attention.merge(m, block.rows(), first == 0, part, part + ROWS * width, part + ROWS * (width + 1));
            attention.finish(block, m.all_sums, m.all_total);
        });
    free(parts);
    return status;
}

int attention(const QkAttention* call, int threads) {
    const Shape shape(*call);
    const Plan plan(*call, shape);
    const Attention all{{*call, shape}};
    const int64_t blocks = plan.blocks(), chunks = plan.most_chunks();
    const size_t bytes = Memory::bytes(shape, call->num_indices);
    if (threads > 1 && blocks < 4 * threads && chunks > 1)
        return in_chunks(plan, all, blocks, chunks, bytes, threads);
    return for_each_with_memory(threads, blocks, bytes,
                                [&](int64_t i, char* memory) { whole_block(plan, all, i, memory); });
}

}  // namespace

#include "attention_index.h"
