/* Quantised layers for AVX2 with FMA. */
#if defined(__x86_64__) || defined(_M_X64)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define NM_ISA_AVX2
#define NM_SUFFIX avx2
#include "quant.inc.c"
#include "quant_fit.inc.c"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
typedef int nm_no_quant_avx2;
#endif
