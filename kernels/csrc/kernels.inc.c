/* The kernels, compiled once per instruction set: the including file defines NM_ISA_... and NM_SUFFIX. */
#include "common.inc.c"

#include "linear.inc.c"
#include "rowwise.inc.c"
#include "tile.inc.c"
#include "attention.inc.c"

const nm_table CAT(nm_table_, NM_SUFFIX) = {
    CAT(linear_, NM_SUFFIX),  CAT(norm_, NM_SUFFIX), CAT(gated_, NM_SUFFIX),      CAT(activate_, NM_SUFFIX),
    CAT(softcap_, NM_SUFFIX), CAT(exp_, NM_SUFFIX),  CAT(rope_write_, NM_SUFFIX), CAT(attention_, NM_SUFFIX),
};
