// What the arithmetics of attention have in common: sizes, a little vector mathematics, reading a token.
#include <stdlib.h>

#include "attention.h"
#include "formats.h"
#include "runtime.h"

namespace {

constexpr int TILE = 64;    // tokens whose keys and values are decoded together, then used by all rows
constexpr int GROUP = 16;   // tokens that are decoded at once
constexpr int ROWS = 64;    // (query, head) pairs that share a tile
constexpr int CHUNK = 512;  // tokens of a decode whose softmax is done apart; the parts are merged in order
constexpr float LOWEST = -__builtin_inff();

QK_INLINE vf fma(vf a, vf b, vf c) {
#if QK_WIDTH == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif QK_WIDTH == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
QK_INLINE bool any_lane(vi mask) {
    int32_t lanes = 0;
    for (int i = 0; i < W; ++i) lanes |= mask[i];
    return lanes != 0;
}
QK_INLINE vi lane_numbers() {
    vi v;
    for (int i = 0; i < W; ++i) v[i] = i;
    return v;
}
QK_INLINE float max_lanes(vf x) {
#if QK_WIDTH == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    float lanes[W];
    store(lanes, x);
    for (int i = 1; i < W; ++i) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
    return lanes[0];
#endif
}
QK_INLINE float sum_lanes(vf x) {
#if QK_WIDTH == 16
    return _mm512_reduce_add_ps((__m512)x);
#else
    float lanes[W];
    store(lanes, x);
    for (int n = W / 2; n; n /= 2)
        for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
    return lanes[0];
#endif
}

// e^x for x <= 0 within 2 units of the last place; exactly 1 for 0; 0 below -87; NaN for NaN.
QK_INLINE vf exponential(vf x) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const vf t = fma(x, splat(1.44269504f), magic);
    const vf n = t - magic;
    const vf r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));  // ln 2 in two parts
    vf p = splat(1.0f / 5040);
    const float coefficients[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (float c : coefficients) p = fma(p, r, splat(c));
    const vf result = number(bits(p) + (bits(t) << 23));  // the low bits of t are those of n
    const vf in_range = x < splat(-87.0f) ? vf{} : result;
    return x == x ? in_range : x;
}
QK_INLINE float exponential(float x) { return exponential(splat(x))[0]; }

// m for use in exp(x - m): where all scores are -inf, 0 keeps the exponentials 0.
QK_INLINE float reference(float m) { return m == LOWEST ? 0.0f : m; }

QK_INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Calls call.run<R>(first row) for runs of at most `most` rows (6 or fewer), as equal as can be.
template <class Call>
QK_INLINE void row_runs(int rows, int most, const Call& call) {
    const int runs = (rows + most - 1) / most;
    for (int i = 0, first = 0; i < runs; ++i) {
        const int n = (rows - first + runs - i - 1) / (runs - i);
        switch (n) {
            case 1: call.template run<1>(first); break;
            case 2: call.template run<2>(first); break;
            case 3: call.template run<3>(first); break;
            case 4: call.template run<4>(first); break;
            case 5: call.template run<5>(first); break;
            default: call.template run<6>(first);
        }
        first += n;
    }
}

// Memory that is handed out piece by piece; with a null base it only counts.
struct Arena {
    char* base;
    size_t used;
    template <class T>
    T* take(int64_t count) {
        used = (used + 63) & ~size_t(63);
        T* p = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + used);
        used += size_t(count) * sizeof(T);
        return p;
    }
};

// Runs step(i, memory) for i in [0, count) with `bytes` of memory for each thread; QK_NO_MEMORY if there is none.
template <class Step>
int for_each_with_memory(int threads, int64_t count, size_t bytes, const Step& step) {
    struct Shared {
        const Step& step;
        int64_t count, next, done;
        size_t bytes;
    } shared{step, count, 0, 0, bytes};
    const int wanted = int(count < threads ? count : threads);
    qk_parallel(
        wanted < 1 ? 1 : wanted,
        [](void* context, int) {
            Shared& s = *static_cast<Shared*>(context);
            char* raw = static_cast<char*>(malloc(s.bytes + 64));
            if (!raw) return;
            char* memory = raw + (64 - (reinterpret_cast<uintptr_t>(raw) & 63));
            for (;;) {
                const int64_t i = __atomic_fetch_add(&s.next, 1, __ATOMIC_RELAXED);
                if (i >= s.count) break;
                s.step(i, memory);
                __atomic_fetch_add(&s.done, 1, __ATOMIC_RELAXED);
            }
            free(raw);
        },
        &shared);
    if (shared.done != count) return QK_NO_MEMORY;
    return QK_OK;
}

}  // namespace
