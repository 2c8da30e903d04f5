/* Quantised layers for AVX-512 (F, BW, DQ, VL). */
#if defined(__x86_64__) || defined(_M_X64)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif
#define NM_ISA_AVX512
#define NM_SUFFIX avx512
#include "quant.inc.c"
#include "quant_fit.inc.c"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
typedef int nm_no_quant_avx512;
#endif
