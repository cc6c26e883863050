// Every processor: four lanes.
#define QK_WIDTH 4
#include "attention_float.h"

extern "C" const QkAttentionOps* qk_attention_portable() { return &OPS; }
