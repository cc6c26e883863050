#if defined(__AVX2__)
#define QK_WIDTH 8
#include "attention_float.h"

extern "C" const QkAttentionOps* qk_attention_avx2() { return &OPS; }
#else
#include "attention.h"
extern "C" const QkAttentionOps* qk_attention_avx2() { return nullptr; }
#endif
