#define QK_WIDTH 4
#include "matmul_float.h"

extern "C" const QkMatmulOps* qk_matmul_portable() { return &OPS; }
