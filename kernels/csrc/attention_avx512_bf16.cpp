#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define QK_WIDTH 16
#include "attention_bf16.h"

extern "C" const QkAttentionOps* qk_attention_avx512_bf16() { return &OPS; }
#else
#include "attention.h"
extern "C" const QkAttentionOps* qk_attention_avx512_bf16() { return nullptr; }
#endif
