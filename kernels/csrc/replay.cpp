// Runs calls that were recorded, one after the other: a step of a small model is a hundred of them, each of some
// microseconds, and what lies between two calls from Python costs as much.
#include "quantkit_kernels.h"

namespace {

// One of the functions (int isa, const CALL*, int threads) of matmul.h, rows.h, route.h, cache.h and attention.h.
struct RecordedCall {
    int (*function)(int isa, const void* call, int threads);
    const void* call;
};

}  // namespace

struct QkReplay {
    const RecordedCall* calls;
    int64_t count;
    int64_t failed;  // written: the number of the call whose status is returned
};

QK_EXPORT int qk_replay(int isa, QkReplay* replay, int threads) {
    for (int64_t i = 0; i < replay->count; ++i) {
        const int status = replay->calls[i].function(isa, replay->calls[i].call, threads);
        if (status == QK_OK) continue;
        replay->failed = i;
        return status;
    }
    return QK_OK;
}
