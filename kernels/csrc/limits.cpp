// What the machine can do at most, for bench/kernels/limits.py: reading memory as fast as it comes.
#include "quantkit_kernels.h"
#include "runtime.h"

#include <string.h>

// Reads `bytes`, a multiple of 256 KiB, on up to `threads` threads; the sum of all 64-bit words goes to `sum`.
QK_EXPORT int qk_read_memory(int, const uint8_t* data, int64_t bytes, int threads, uint64_t* sum) {
    typedef uint64_t Line __attribute__((vector_size(64)));
    constexpr int64_t BLOCK = 1 << 18, AHEAD = 8192;
    uint64_t total = 0;
    qk_for_each(threads, bytes / BLOCK, 1, [&](int64_t block) {
        const uint8_t* p = data + block * BLOCK;
        Line part{};
        for (int64_t i = 0; i < BLOCK; i += 64) {
            __builtin_prefetch(p + i + AHEAD, 0, 2);
            Line line;
            memcpy(&line, p + i, sizeof line);
            part += line;
        }
        uint64_t lanes = 0;
        for (int i = 0; i < 8; ++i) lanes += part[i];
        __atomic_fetch_add(&total, lanes, __ATOMIC_RELAXED);
    });
    *sum = total;
    return QK_OK;
}
