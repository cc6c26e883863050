// Every processor: four lanes, which is SSE2 on x86-64 and NEON on aarch64.
#define QK_WIDTH 4
#include "convert_impl.h"

extern "C" const QkOps* qk_ops_portable() { return &OPS; }
