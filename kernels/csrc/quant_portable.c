/* Quantised layers for any machine. */
#define NM_ISA_PORTABLE
#define NM_SUFFIX portable
#include "quant.inc.c"
#include "quant_fit.inc.c"
