#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define QK_WIDTH 16
#include "attention_float.h"

extern "C" const QkAttentionOps* qk_attention_avx512() { return &OPS; }
#else
#include "attention.h"
extern "C" const QkAttentionOps* qk_attention_avx512() { return nullptr; }
#endif
