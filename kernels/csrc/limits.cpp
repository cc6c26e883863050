// What the machine can do at most, for bench/kernels/limits.py: reading memory as fast as it comes.
#include "quantkit_kernels.h"
#include "runtime.h"

#include <string.h>

// Reads `bytes`, a multiple of 64 KiB, on up to `threads` threads; the sum of all 64-bit words goes to `sum`. Eight
// streams at once, a few KiB apart, as the matrix products read rows: one alone leaves a third of the bandwidth unused.
QK_EXPORT int qk_read_memory(int, const uint8_t* data, int64_t bytes, int threads, uint64_t* sum) {
    typedef uint64_t Line __attribute__((vector_size(64)));
    constexpr int STREAMS = 8;
    constexpr int64_t STREAM = 1 << 13, AHEAD = 1024;
    uint64_t total = 0;
    qk_for_each(threads, bytes / (STREAMS * STREAM), 4, [&](int64_t block) {
        const uint8_t* p = data + block * STREAMS * STREAM;
        Line parts[STREAMS] = {};
        for (int64_t i = 0; i < STREAM; i += 64) {
            for (int s = 0; s < STREAMS; ++s) {
                __builtin_prefetch(p + s * STREAM + i + AHEAD, 0, 2);
                Line line;
                memcpy(&line, p + s * STREAM + i, sizeof line);
                parts[s] += line;
            }
        }
        uint64_t lanes = 0;
        for (const Line& part : parts)
            for (int i = 0; i < 8; ++i) lanes += part[i];
        __atomic_fetch_add(&total, lanes, __ATOMIC_RELAXED);
    });
    *sum = total;
    return QK_OK;
}
