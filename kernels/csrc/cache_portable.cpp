// Every processor: four lanes.
#define QK_WIDTH 4
#include "cache_impl.h"

extern "C" const QkCacheOps* qk_cache_portable() { return &OPS; }
