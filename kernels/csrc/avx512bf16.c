/* Build for AVX-512 with BF16: a pair of bfloat16 products a lane and instruction. */
#if defined(__x86_64__) || defined(_M_X64)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")
#endif
#define NM_ISA_AVX512
#define NM_ISA_BF16
#define NM_SUFFIX avx512bf16
#include "kernels.inc.c"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
typedef int nm_no_avx512bf16;
#endif
