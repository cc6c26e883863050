// Threads for the native operations, from the OpenMP runtime that torch uses.
//
// Not linked: two OpenMP runtimes in one process keep two pools of threads that spin for work on the same cores.
// quantkit_kernels/openmp.py finds torch's runtime and hands over its entry points; GOMP_parallel is GCC's stable
// ABI, which LLVM's and Intel's runtimes have too. Without one everything runs in the calling thread.
#ifndef QK_RUNTIME_H
#define QK_RUNTIME_H

#include <stdint.h>

typedef void (*QkTask)(void* context, int thread);

// Runs task(context, t) for t in [0, n) at once, n <= threads, in a known floating-point environment each; waits
// for all. Fewer may run, in the extreme only t = 0: a task takes its work from a shared counter.
extern "C" void qk_parallel(int threads, QkTask task, void* context);

namespace {

// Calls step(i, thread) for every i in [0, count), in chunks that idle threads take, thread < threads; who gets which
// is not determined, so a result must not depend on it.
template <class Step>
inline void qk_for_each_on(int threads, int64_t count, int64_t chunk, const Step& step) {
    struct Shared {
        const Step& step;
        int64_t count, chunk, next;
    } shared{step, count, chunk < 1 ? 1 : chunk, 0};
    const int64_t chunks = (count + shared.chunk - 1) / shared.chunk;
    const int wanted = int(chunks < threads ? chunks : threads);
    qk_parallel(
        wanted < 1 ? 1 : wanted,
        [](void* context, int thread) {
            Shared& s = *static_cast<Shared*>(context);
            for (;;) {
                const int64_t first = __atomic_fetch_add(&s.next, s.chunk, __ATOMIC_RELAXED);
                if (first >= s.count) return;
                const int64_t last = first + s.chunk < s.count ? first + s.chunk : s.count;
                for (int64_t i = first; i < last; ++i) s.step(i, thread);
            }
        },
        &shared);
}

// The same for steps that need no memory of their thread's.
template <class Step>
inline void qk_for_each(int threads, int64_t count, int64_t chunk, const Step& step) {
    qk_for_each_on(threads, count, chunk, [&](int64_t i, int) { step(i); });
}

}  // namespace

#endif
