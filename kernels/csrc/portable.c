/* Build for any machine: plain C with fmaf. */
#define NM_ISA_PORTABLE
#define NM_SUFFIX portable
#include "kernels.inc.c"
