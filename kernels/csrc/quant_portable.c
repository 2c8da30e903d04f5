/* Quantised layers for any machine. The third level of optimisation unrolls its loops over arrays for half a minute. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O2")
#endif
#define NM_ISA_PORTABLE
#define NM_SUFFIX portable
#include "quant.inc.c"
#include "quant_fit.inc.c"
