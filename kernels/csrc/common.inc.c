/* What the kernels of one instruction set share: helpers, and the chain of fused multiply-adds.
 *
 * No reduction is ever split among threads or by the row count. Every element of a product (linear layer, score,
 * weighted sum of values) is one chain of fused multiply-adds in index order starting from +0.
 */
#include "api.h"
#include "vec.h"
#include "vmath.h"

#define CAT2(a, b) a##b
#define CAT(a, b) CAT2(a, b)

#define SCRATCH_ROWS 0
#define SCRATCH_TILE 1
#define SCRATCH_SHARED 2
#define SCRATCH_BLOCKS 3

#define NM_SEGMENT 64 /* steps of one fma chain; part of the numeric policy */
#define TINY_WORK 16384 /* multiply-adds or elements below which a second thread costs more than it brings */

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE V16 load_weights(const void *p, int64_t at, int bf16) {
    return bf16 ? v_load_bf16((const uint16_t *)p + at) : v_load((const float *)p + at);
}
INLINE const void *element(const void *p, int64_t at, int bf16) {
    return bf16 ? (const void *)((const uint16_t *)p + at) : (const void *)((const float *)p + at);
}

/* ---- chains: out[i][c] = fma chain over s of x[i * xs + s] * w[s * ws + c], c in 16 or 32 columns ----
 *
 * Over a weight panel the chain is cut into segments of NM_SEGMENT steps at absolute multiples, whose sums are added in
 * order: the error of one long chain would grow with the square root of its length times that of a segment.
 * w0 and w1 are the two groups of 16 columns, the halves of a weight panel (ws = 32); pf0 and pf1 are prefetched at the same pace (few rows only: with many rows the arithmetic hides the loads).
 */
INLINE void chains(const int mr, const int nv, const int bf16, const int ws, int64_t steps, const float *x,
                   int64_t xs, const void *w0, const void *w1, const void *pf0, const void *pf1, float *out,
                   int64_t os) {
    if (ws == NM_PANEL) w1 = element(w0, 16, bf16); /* one base register instead of two */
    const int64_t segment = ws == NM_PANEL ? NM_SEGMENT : steps;
    int64_t from = 0;
    do {
        const int64_t to = min64(steps, from + segment);
        V16 acc[MR_MAX][2];
        for (int i = 0; i < mr; i++)
            for (int c = 0; c < nv; c++) acc[i][c] = v_zero();
#pragma GCC unroll 2
        for (int64_t s = from; s < to; s++) {
            if (mr <= 4) {
                __builtin_prefetch(element(pf0, s * ws, bf16));
                if (nv > 1 && !bf16) __builtin_prefetch(element(pf1, s * ws, bf16));
            }
            const V16 b0 = load_weights(w0, s * ws, bf16);
            const V16 b1 = nv > 1 ? load_weights(w1, s * ws, bf16) : b0;
            for (int i = 0; i < mr; i++) {
                const V16 a = v_set1(x[i * xs + s]);
                acc[i][0] = v_fma(a, b0, acc[i][0]);
                if (nv > 1) acc[i][1] = v_fma(a, b1, acc[i][1]);
            }
        }
        /* Sums of segments are added in order; the first one is stored, so that no zero is added to it. */
        for (int i = 0; i < mr; i++)
            for (int c = 0; c < nv; c++) {
                float *o = out + i * os + 16 * c;
                v_store(o, from ? v_add(v_load(o), acc[i][c]) : acc[i][c]);
            }
        from = to;
    } while (from < steps);
}

typedef void (*chains_fn)(int64_t, const float *, int64_t, const void *, const void *, const void *, const void *,
                          float *, int64_t);

#define DEFINE_CHAINS(kind, ws, mr, nv, bf)                                                                         \
    NOINLINE void kind##_##mr##_##nv##_##bf(int64_t n, const float *x, int64_t xs, const void *w0, const void *w1,  \
                                            const void *p0, const void *p1, float *out, int64_t os) {               \
        chains(mr, nv, bf, ws, n, x, xs, w0, w1, p0, p1, out, os);                                                  \
    }

/* define(rows) for each row count of a micro-kernel, and the table of their names(rows). */
#if MR_MAX >= 12
#define FOR_ROWS(define) \
    define(1) define(2) define(3) define(4) define(5) define(6) define(7) define(8) define(9) define(10) define(11) define(12)
#define EVERY(names) {names(1), names(2), names(3), names(4), names(5), names(6), \
                      names(7), names(8), names(9), names(10), names(11), names(12)}
#elif MR_MAX >= 6
#define FOR_ROWS(define) define(1) define(2) define(3) define(4) define(5) define(6)
#define EVERY(names) {names(1), names(2), names(3), names(4), names(5), names(6)}
#else
#define FOR_ROWS(define) define(1) define(2) define(3) define(4)
#define EVERY(names) {names(1), names(2), names(3), names(4)}
#endif
