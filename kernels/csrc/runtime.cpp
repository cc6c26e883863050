// See runtime.h.
#include "runtime.h"

#include "environment.h"
#include "quantkit_kernels.h"

namespace {

typedef void (*Parallel)(void (*function)(void*), void* data, unsigned threads, unsigned flags);
typedef int (*ThreadNumber)();

Parallel openmp_parallel = nullptr;
ThreadNumber openmp_thread_number = nullptr;

struct Call {
    QkTask task;
    void* context;
};

void run(void* data) {
    const Call& call = *static_cast<const Call*>(data);
    FloatEnvironment environment;
    call.task(call.context, openmp_thread_number());
}

}  // namespace

extern "C" void qk_parallel(int threads, QkTask task, void* context) {
    if (threads > 1 && openmp_parallel) {
        Call call{task, context};
        openmp_parallel(run, &call, unsigned(threads), 0);
        return;
    }
    FloatEnvironment environment;
    task(context, 0);
}

// Addresses of GOMP_parallel and omp_get_thread_num of one runtime; null for none. Before the first operation.
QK_EXPORT void qk_set_openmp(void* parallel, void* thread_number) {
    openmp_thread_number = reinterpret_cast<ThreadNumber>(thread_number);
    openmp_parallel = thread_number ? reinterpret_cast<Parallel>(parallel) : nullptr;
}
