// Quantizing into and reading from pages, for one instruction set. The rule of scales and codes is in pages.py.
#include "cache.h"
#include "formats.h"
#include "runtime.h"

namespace {

constexpr int64_t TOKENS = 8;  // at a time by one thread

QK_INLINE float largest(vf x) {
    float lanes[W], most = 0;
    store(lanes, x);
    for (int i = 0; i < W; ++i) most = lanes[i] > most ? lanes[i] : most;
    return most;
}

QK_INLINE vf read_bf16(const uint16_t* p, int lanes) { return from_bf16(widen(load_some<vh>(p, lanes))); }

// One run of values that share a scale.
void quantize(const uint16_t* values, int64_t n, uint8_t* codes, uint8_t* scale_at) {
    vf most{};
    vectors(n, [&](int64_t i, int lanes) QK_LAMBDA {
        const vf size = number(magnitude(read_bf16(values + i, lanes)));
        most = maxf(most, number(bits(size) & (bits(size) < INFINITE)));
    });
    float scale = largest(most) / 448.0f;
    if (scale == 0) scale = FP8_ZERO_SCALE;
    memcpy(scale_at, &scale, 4);
    vectors(n, [&](int64_t i, int lanes) QK_LAMBDA {
        const vf x = read_bf16(values + i, lanes);
        const vi is_finite = magnitude(x) < INFINITE;
        const vf quotient = number(bits(x) & is_finite) / splat(scale);
        store_some(codes + i, to_bytes((encode_e4m3(quotient) & is_finite) | (0x7f & ~is_finite)), lanes);
    });
}

int store(const QkStore* call, int threads) {
    const QkPart& part = call->part;
    qk_for_each(threads, call->tokens, TOKENS, [&](int64_t token) {
        const int64_t slot = call->slots[token * call->slot_stride];
        if (slot < 0) return;
        uint8_t* page = call->pool.pages + slot / call->pool.page_size * call->pool.stride;
        const int64_t offset = slot % call->pool.page_size;
        for (int64_t g = 0; g < part.groups; ++g) {
            const uint16_t* values = call->values + token * call->token_stride + g * call->group_stride;
            uint8_t* to = page + part.start + g * part.group_stride + offset * part.token_stride;
            if (part.is_fp8)
                quantize(values, part.columns, to,
                         page + part.scale_start + g * part.scale_group_stride + offset * part.scale_token_stride);
            else
                memcpy(to, values, size_t(part.columns) * 2);
        }
    });
    return QK_OK;
}

void read(const QkPart& part, const uint8_t* page, int64_t offset, uint16_t* out) {
    for (int64_t g = 0; g < part.groups; ++g, out += part.columns) {
        const uint8_t* from = page + part.start + g * part.group_stride + offset * part.token_stride;
        if (!part.is_fp8) {
            memcpy(out, from, size_t(part.columns) * 2);
            continue;
        }
        float scale;
        const int64_t scale_at = part.scale_start + g * part.scale_group_stride + offset * part.scale_token_stride;
        memcpy(&scale, page + scale_at, 4);
        vectors(part.columns, [&](int64_t i, int lanes) QK_LAMBDA {
            const vf x = decode_e4m3_or_nan(load_some<vb>(from + i, lanes)) * splat(scale);
            store_some(out + i, to_halves(bf16_of(x)), lanes);
        });
    }
}

int gather(const QkGather* call, int threads) {
    const int64_t row = call->part.groups * call->part.columns, size = call->pool.page_size;
    qk_for_each(threads, call->requests * call->longest, TOKENS, [&](int64_t i) {
        const int64_t r = i / call->longest, position = i % call->longest;
        uint16_t* out = call->out + i * row;
        if (position >= call->lengths[r * call->length_stride]) {
            memset(out, 0, size_t(row) * 2);
            return;
        }
        const int64_t page = call->table[r * call->table_stride + position / size];
        read(call->part, call->pool.pages + page * call->pool.stride, position % size, out);
    });
    return QK_OK;
}

const QkCacheOps OPS = {store, gather};

}  // namespace
