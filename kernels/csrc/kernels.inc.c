/* The kernels, compiled once per instruction set: the including file defines NM_ISA_... and NM_SUFFIX.
 *
 * No reduction is ever split among threads or by the row count. Every element of a product (linear layer, score,
 * weighted sum of values) is one chain of fused multiply-adds in index order starting from +0.
 */
#include "api.h"
#include "vec.h"

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
 * w0 and w1 are the two groups of 16 columns: the halves of a weight panel (ws = 32) or the keys of two pages
 * (ws = 16); pf0 and pf1 are prefetched at the same pace (few rows only: with many rows the arithmetic hides the loads).
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

/* ---- pairs: the same over a bfloat16 panel; each step takes two k, the odd one first ---- */
INLINE void pairs(const int mr, const int nv, int64_t steps, const uint16_t *x, int64_t xs, const uint16_t *w,
                  const uint16_t *ahead, float *out, int64_t os) {
    int64_t from = 0;
    do {
        const int64_t to = min64(steps, from + NM_SEGMENT / 2);
        V16 acc[MR_MAX][2];
        for (int i = 0; i < mr; i++)
            for (int c = 0; c < nv; c++) acc[i][c] = v_zero();
#pragma GCC unroll 2
        for (int64_t s = from; s < to; s++) {
            if (mr <= 4) {
                __builtin_prefetch(ahead + s * 2 * NM_PANEL);
                if (nv > 1) __builtin_prefetch(ahead + s * 2 * NM_PANEL + NM_PANEL);
            }
            const P16 b0 = v_pairs(w + s * 2 * NM_PANEL);
            const P16 b1 = nv > 1 ? v_pairs(w + s * 2 * NM_PANEL + NM_PANEL) : b0;
            for (int i = 0; i < mr; i++) {
                const P16 a = v_pair1(x + i * xs + 2 * s);
                acc[i][0] = v_dot2(acc[i][0], a, b0);
                if (nv > 1) acc[i][1] = v_dot2(acc[i][1], a, b1);
            }
        }
        for (int i = 0; i < mr; i++)
            for (int c = 0; c < nv; c++) {
                float *o = out + i * os + 16 * c;
                v_store(o, from ? v_add(v_load(o), acc[i][c]) : acc[i][c]);
            }
        from = to;
    } while (from < steps);
}

/* ---- weighted sums: out[i][c] continues its chain over keys [lo, hi) of p[i * ps + key] * V[key][c] ----
 *
 * Keys are counted from the split's first key, a multiple of the page size; `table` starts at that page. `values`
 * points at this head's first page and column, `page_step` is the distance of two physical pages, `width` of two keys.
 * With few rows, `ahead` columns of the next page are prefetched meanwhile.
 */
INLINE void sums(const int mr, const int nv, const int bf16, const int32_t *table, int64_t lo, int64_t hi,
                 const float *p, int64_t ps, const void *values, int64_t page_step, int64_t width, int64_t ahead,
                 float *out, int64_t os) {
    V16 acc[MR_MAX][2];
    for (int i = 0; i < mr; i++)
        for (int c = 0; c < nv; c++) acc[i][c] = v_load(out + i * os + 16 * c);
    for (int64_t key = lo; key < hi;) {
        const int64_t page = key / NM_PAGE, end = min64(hi, (page + 1) * NM_PAGE);
        const void *v = element(values, table[page] * page_step, bf16);
        const void *next = end < hi ? element(values, table[page + 1] * page_step, bf16) : v;
#pragma GCC unroll 4
        for (; key < end; key++) {
            const int64_t at = (key % NM_PAGE) * width;
            if (mr <= 4)
                for (int64_t c = 0; c < ahead; c += bf16 ? 32 : 16) __builtin_prefetch(element(next, at + c, bf16));
            const V16 b0 = load_weights(v, at, bf16);
            const V16 b1 = nv > 1 ? load_weights(v, at + 16, bf16) : b0;
            for (int i = 0; i < mr; i++) {
                const V16 a = v_set1(p[i * ps + key]);
                acc[i][0] = v_fma(a, b0, acc[i][0]);
                if (nv > 1) acc[i][1] = v_fma(a, b1, acc[i][1]);
            }
        }
    }
    for (int i = 0; i < mr; i++)
        for (int c = 0; c < nv; c++) v_store(out + i * os + 16 * c, acc[i][c]);
}

typedef void (*chains_fn)(int64_t, const float *, int64_t, const void *, const void *, const void *, const void *,
                          float *, int64_t);
typedef void (*pairs_fn)(int64_t, const uint16_t *, int64_t, const uint16_t *, const uint16_t *, float *, int64_t);
typedef void (*sums_fn)(const int32_t *, int64_t, int64_t, const float *, int64_t, const void *, int64_t, int64_t,
                        int64_t, float *, int64_t);

#define DEFINE_CHAINS(kind, ws, mr, nv, bf)                                                                         \
    NOINLINE void kind##_##mr##_##nv##_##bf(int64_t n, const float *x, int64_t xs, const void *w0, const void *w1,  \
                                            const void *p0, const void *p1, float *out, int64_t os) {               \
        chains(mr, nv, bf, ws, n, x, xs, w0, w1, p0, p1, out, os);                                                  \
    }
#define DEFINE_PAIRS(mr, nv)                                                                                    \
    NOINLINE void pairs_##mr##_##nv(int64_t n, const uint16_t *x, int64_t xs, const uint16_t *w, const uint16_t *p, \
                                    float *out, int64_t os) {                                                       \
        pairs(mr, nv, n, x, xs, w, p, out, os);                                                                     \
    }
#define DEFINE(mr, nv, bf)                                                                                          \
    DEFINE_CHAINS(keys, NM_PAGE, mr, nv, bf)                                                                        \
    NOINLINE void sums_##mr##_##nv##_##bf(const int32_t *table, int64_t lo, int64_t hi, const float *p, int64_t ps, \
                                          const void *v, int64_t step, int64_t width, int64_t ahead, float *out,    \
                                          int64_t os) {                                                             \
        sums(mr, nv, bf, table, lo, hi, p, ps, v, step, width, ahead, out, os);                                     \
    }
#define DEFINE4(mr)                                                                                                 \
    DEFINE_CHAINS(panel, NM_PANEL, mr, 1, 0) DEFINE_CHAINS(panel, NM_PANEL, mr, 2, 0)                               \
    DEFINE_PAIRS(mr, 1) DEFINE_PAIRS(mr, 2) DEFINE(mr, 1, 0) DEFINE(mr, 2, 0) DEFINE(mr, 1, 1) DEFINE(mr, 2, 1)
#define NAMES(kind, mr) {{kind##_##mr##_1_0, kind##_##mr##_1_1}, {kind##_##mr##_2_0, kind##_##mr##_2_1}}

DEFINE4(1) DEFINE4(2) DEFINE4(3) DEFINE4(4)
#if MR_MAX >= 6
DEFINE4(5) DEFINE4(6)
#endif
#if MR_MAX >= 12
DEFINE4(7) DEFINE4(8) DEFINE4(9) DEFINE4(10) DEFINE4(11) DEFINE4(12)
#endif

#define PANEL_NAMES(mr) {panel_##mr##_1_0, panel_##mr##_2_0}
#define PAIRS_NAMES(mr) {pairs_##mr##_1, pairs_##mr##_2}

#if MR_MAX >= 12
#define EVERY(names) {names(1), names(2), names(3), names(4), names(5), names(6), \
                      names(7), names(8), names(9), names(10), names(11), names(12)}
#elif MR_MAX >= 6
#define EVERY(names) {names(1), names(2), names(3), names(4), names(5), names(6)}
#else
#define EVERY(names) {names(1), names(2), names(3), names(4)}
#endif

#if MR_MAX >= 12
#define ALL(kind)                                                                                              \
    {                                                                                                          \
        NAMES(kind, 1), NAMES(kind, 2), NAMES(kind, 3), NAMES(kind, 4), NAMES(kind, 5), NAMES(kind, 6),        \
            NAMES(kind, 7), NAMES(kind, 8), NAMES(kind, 9), NAMES(kind, 10), NAMES(kind, 11), NAMES(kind, 12), \
    }
#elif MR_MAX >= 6
#define ALL(kind) \
    { NAMES(kind, 1), NAMES(kind, 2), NAMES(kind, 3), NAMES(kind, 4), NAMES(kind, 5), NAMES(kind, 6), }
#else
#define ALL(kind) \
    { NAMES(kind, 1), NAMES(kind, 2), NAMES(kind, 3), NAMES(kind, 4), }
#endif

static const chains_fn PANELS[MR_MAX][2] = EVERY(PANEL_NAMES);
static const pairs_fn PAIRS[MR_MAX][2] = EVERY(PAIRS_NAMES);
static const chains_fn KEY_CHAINS[MR_MAX][2][2] = ALL(keys);
static const sums_fn SUMS[MR_MAX][2][2] = ALL(sums);

/* Scores of up to MR_MAX rows with one or two pages of keys. */
INLINE void run_keys(int64_t rows, int groups, int bf16, int64_t steps, const float *x, int64_t xs, const void *w0,
                     const void *w1, const void *p0, const void *p1, float *out, int64_t os) {
    if (groups == 2 && rows <= MR_WIDE) {
        KEY_CHAINS[rows - 1][1][bf16](steps, x, xs, w0, w1, p0, p1, out, os);
        return;
    }
    KEY_CHAINS[rows - 1][0][bf16](steps, x, xs, w0, w0, p0, p0, out, os);
    if (groups == 2) KEY_CHAINS[rows - 1][0][bf16](steps, x, xs, w1, w1, p1, p1, out + 16, os);
}

/* ---- argmax: the first of the largest; the first NaN where there is one ---- */

#define ARGMAX_BLOCK 1024

NOINLINE int64_t argmax_plain(const float *x, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 0; i < n; i++) {
        if (x[i] != x[i]) return i;
        if (x[i] > x[best]) best = i;
    }
    return best;
}

INLINE int64_t argmax_of(const float *x, int64_t n) {
    float best = -INFINITY, lanes[16];
    int64_t block = 0;
    V16 odd = v_zero(); /* x - x: zero, or NaN of what is not finite */
    for (int64_t at = 0; at + 16 <= n; at += ARGMAX_BLOCK) {
        const int64_t end = min64(n - 15, at + ARGMAX_BLOCK);
        V16 most = v_load(x + at);
        for (int64_t i = at; i < end; i += 16) {
            const V16 v = v_load(x + i);
            most = v_max(most, v);
            odd = v_add(odd, v_sub(v, v));
        }
        v_store(lanes, most);
        for (int i = 0; i < 16; i++)
            if (lanes[i] > best) best = lanes[i], block = at;
    }
    v_store(lanes, odd);
    int finite = 1;
    for (int i = 0; i < 16; i++) finite &= lanes[i] == 0.0f;
    for (int64_t i = n / 16 * 16; i < n; i++) {
        finite &= x[i] - x[i] == 0.0f;
        if (x[i] > best) best = x[i], block = i;
    }
    if (!finite) return argmax_plain(x, n);
    while (x[block] != best) block++;
    return block;
}

/* ---- linear: out = x . w^T (+ bias) (+ residual) ---- */

typedef struct {
    const nm_matrix *w;
    const float *x, *residual;
    float *out;
    int64_t x_stride, r_stride, o_stride, rows;
    int64_t panels;
    int64_t shares; /* few rows: contiguous shares of the columns ... */
    int64_t unit;   /* ... in whole panels (2) or halves of panels (1) */
    int64_t chunk;  /* many rows: rows of an item */
    uint16_t *rounded; /* bfloat16 layers: the rows rounded to bfloat16 */
    int64_t rounded_stride;
    const nm_peaks *peaks; /* NULL: not asked for */
    int64_t *peaked;       /* few rows: [shares][rows], columns of the largest, -1 of none */
} linear_args;

INLINE void finish_rows(const linear_args *a, int64_t row, int64_t rows, int64_t column, int64_t columns,
                        const float *acc) {
    const float *bias = a->w->bias;
    for (int64_t c = 0; c < columns; c += 16) {
        const int64_t n = min64(16, columns - c), at = column + c;
        const V16 b = !bias ? v_zero() : n == 16 ? v_load(bias + at) : v_load_part(bias + at, n);
        for (int64_t i = 0; i < rows; i++) {
            V16 y = v_load(acc + i * NM_PANEL + c);
            if (bias) y = v_add(y, b);
            if (a->residual) {
                const float *r = a->residual + (row + i) * a->r_stride + at;
                y = v_add(y, n == 16 ? v_load(r) : v_load_part(r, n));
            }
            float *o = a->out + (row + i) * a->o_stride + at;
            if (n == 16) v_store(o, y);
            else v_store_part(o, y, n);
        }
    }
}

#define AHEAD 24 /* steps of weights prefetched ahead (few rows) */

/* Products of rows [row, row + rows) with one or two groups of 16 columns of a panel. */
INLINE void run_panel(const linear_args *a, int64_t row, int64_t rows, int64_t panel, int64_t half, int groups,
                      float *out) {
    const int64_t k = a->w->k;
    for (int at = 0; at < groups;) {
        const int taken = groups - at == 2 && rows <= MR_WIDE ? 2 : 1;
        if (a->w->bf16) {
            const uint16_t *w = (const uint16_t *)a->w->panels + panel * NM_PANEL * a->rounded_stride + (half + at) * NM_PANEL;
            PAIRS[rows - 1][taken - 1](a->rounded_stride / 2, a->rounded + row * a->rounded_stride, a->rounded_stride, w,
                                       w + AHEAD * 2 * NM_PANEL, out + 16 * at, NM_PANEL);
        } else {
            const float *w = (const float *)a->w->panels + panel * NM_PANEL * k + (half + at) * 16, *p = w + AHEAD * NM_PANEL;
            PANELS[rows - 1][taken - 1](k, a->x + row * a->x_stride, a->x_stride, w, w + 16, p, p + 16, out + 16 * at,
                                        NM_PANEL);
        }
        at += taken;
    }
}

/* A share of the column groups (16 columns), for at most MR_MAX rows: the weights are read once, in order. */
NOINLINE void linear_few(const void *context, int64_t item) {
    const linear_args *a = context;
    const nm_matrix *w = a->w;
    const int64_t groups = (w->n + 15) / 16, units = (groups + a->unit - 1) / a->unit;
    const int64_t size = units / a->shares, larger = units % a->shares; /* the larger shares come first */
    int64_t group = (item * size + min64(item, larger)) * a->unit;
    const int64_t end = min64(groups, group + (size + (item < larger)) * a->unit), first = group * 16;
    float acc[MR_MAX * NM_PANEL];
    const uint64_t mode = nm_float_mode(w->bf16 ? NM_MODE_FLUSH : NM_MODE_DEFAULT);
    while (group < end) {
        const int64_t pair = group % 2 == 0 && group + 1 < end ? 2 : 1;
        run_panel(a, 0, a->rows, group / 2, group % 2, (int)pair, acc);
        finish_rows(a, 0, a->rows, group * 16, min64(pair * 16, w->n - group * 16), acc);
        group += pair;
    }
    nm_float_mode(mode);
    if (!a->peaks) return;
    /* While the share is in the cache. */
    const int64_t columns = min64(end * 16, a->peaks->limit) - first;
    for (int64_t i = 0; i < a->rows; i++)
        a->peaked[item * a->rows + i] = columns > 0 ? first + argmax_of(a->out + i * a->o_stride + first, columns) : -1;
}

/* One panel times one chunk of rows. */
NOINLINE void linear_many(const void *context, int64_t item) {
    const linear_args *a = context;
    const int64_t panel = item % a->panels, first = (item / a->panels) * a->chunk;
    const int64_t rows = min64(a->chunk, a->rows - first);
    const int64_t columns = min64(NM_PANEL, a->w->n - panel * NM_PANEL);
    const int64_t blocks = (rows + MR_MAX - 1) / MR_MAX;
    float acc[MR_MAX * NM_PANEL];
    const uint64_t mode = nm_float_mode(a->w->bf16 ? NM_MODE_FLUSH : NM_MODE_DEFAULT);
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t lo = first + b * rows / blocks, n = first + (b + 1) * rows / blocks - lo;
        const float *out = a->out + lo * a->o_stride + panel * NM_PANEL;
        for (int64_t i = 0; i < n; i++) { /* to the second level, while the products run */
            __builtin_prefetch(out + i * a->o_stride, 0, 2);
            __builtin_prefetch(out + i * a->o_stride + 16, 0, 2);
        }
        /* Not straight to the output: rows a multiple of 4096 bytes apart share one set of the first level. */
        run_panel(a, lo, n, panel, 0, columns > 16 ? 2 : 1, acc);
        finish_rows(a, lo, n, panel * NM_PANEL, columns, acc);
    }
    nm_float_mode(mode);
}

#define ROUND_ROWS 16 /* rows of an item of the rounding */

/* Rows rounded to bfloat16 for a bfloat16 layer, an odd width padded with a zero. */
NOINLINE void round_rows(const void *context, int64_t item) {
    const linear_args *a = context;
    const int64_t k = a->w->k, end = min64(a->rows, (item + 1) * ROUND_ROWS);
    for (int64_t row = item * ROUND_ROWS; row < end; row++) {
        const float *x = a->x + row * a->x_stride;
        uint16_t *out = a->rounded + row * a->rounded_stride;
        for (int64_t i = 0; i < k; i++) out[i] = f32_to_bf16_normal(x[i]);
        if (k % 2) out[k] = 0;
    }
}

/* The largest of each row, from the shares in the order of their columns. */
static void gather_peaks(const linear_args *a) {
    for (int64_t i = 0; i < a->rows; i++) {
        const float *x = a->out + i * a->o_stride;
        int64_t best = a->peaked[i];
        for (int64_t share = 1; share < a->shares && x[best] == x[best]; share++) {
            const int64_t at = a->peaked[share * a->rows + i];
            if (at >= 0 && (x[at] > x[best] || x[at] != x[at])) best = at;
        }
        a->peaks->index[i] = best;
        a->peaks->value[i] = x[best];
    }
}

static int64_t CAT(linear_, NM_SUFFIX)(const nm_matrix *w, const float *x, int64_t x_stride, const float *residual,
                                       int64_t r_stride, float *out, int64_t o_stride, int64_t rows,
                                       const nm_peaks *peaks) {
    if (rows <= 0 || w->n <= 0) return 0;
    const int64_t work = rows * w->n * w->k, threads = work < TINY_WORK ? 1 : nm_threads();
    linear_args a = {w, x, residual, out, x_stride, r_stride, o_stride, rows, (w->n + 31) / 32, threads, 1, rows, NULL, 0,
                     peaks, NULL};
    if (w->bf16) {
        a.rounded_stride = (w->k + 1) / 2 * 2;
        a.rounded = nm_scratch(SCRATCH_ROWS, (size_t)(rows * a.rounded_stride) * sizeof(uint16_t));
        if (!a.rounded) return -1;
        const int64_t items = (rows + ROUND_ROWS - 1) / ROUND_ROWS;
        nm_for(items, items < 4 ? 1 : threads, round_rows, &a);
    }
    if (rows <= MR_MAX) {
        /* Shares are handed out one by one, so that a busy core takes fewer; of a narrow matrix each thread gets one,
         * equal to half a panel. */
        if (threads > 1 && a.panels >= 4 * threads) {
            a.shares = 4 * threads;
            a.unit = 2;
        }
        if (peaks) {
            a.peaked = nm_scratch(SCRATCH_SHARED, (size_t)(a.shares * rows) * sizeof(int64_t));
            if (!a.peaked) return -1;
        }
        nm_for(a.shares, threads, linear_few, &a);
        if (peaks) gather_peaks(&a);
        return 0;
    }
    /* A chunk of rows stays in the second-level cache while the panels pass by. */
    a.chunk = max64(5, 256 * 1024 / (4 * w->k * 12)) * 12;
    const int64_t chunks = (rows + a.chunk - 1) / a.chunk;
    a.chunk = (rows + chunks - 1) / chunks;
    nm_for(a.panels * chunks, threads, linear_many, &a);
    for (int64_t i = 0; peaks && i < rows; i++) {
        const float *y = out + i * o_stride;
        peaks->index[i] = argmax_of(y, peaks->limit);
        peaks->value[i] = y[peaks->index[i]];
    }
    return 0;
}

/* ---- rms norm ---- */

typedef struct {
    const float *x, *weight;
    float *out;
    float eps, offset;
    int64_t x_stride, o_stride, rows, groups, width, shares; /* a row is `groups` vectors of `width` */
} norm_args;

NOINLINE void norm_rows(const void *context, int64_t item) {
    const norm_args *a = context;
    const int64_t width = a->width, whole = width / 16 * 16;
    const V16 offset = v_set1(a->offset);
    const int64_t total = a->rows * a->groups;
    for (int64_t v = item * total / a->shares; v < (item + 1) * total / a->shares; v++) {
        const int64_t row = v / a->groups, at = v % a->groups * width;
        const float *x = a->x + row * a->x_stride + at;
        float *out = a->out + row * a->o_stride + at;
        V16 acc = v_zero();
        for (int64_t i = 0; i < whole; i += 16) {
            const V16 v = v_load(x + i);
            acc = v_fma(v, v, acc);
        }
        if (whole < width) {
            const V16 v = v_load_part(x + whole, width - whole);
            acc = v_fma(v, v, acc);
        }
        const float mean = v_sum(acc) / (float)width;
        const V16 scale = v_set1(1.0f / sqrtf(mean + a->eps));
        for (int64_t i = 0; i < whole; i += 16)
            v_store(out + i, v_mul(v_mul(v_load(x + i), scale), v_add(offset, v_load(a->weight + i))));
        if (whole < width) {
            const int64_t n = width - whole;
            const V16 w = v_add(offset, v_load_part(a->weight + whole, n));
            v_store_part(out + whole, v_mul(v_mul(v_load_part(x + whole, n), scale), w), n);
        }
    }
}

static void CAT(rms_norm_, NM_SUFFIX)(const float *x, int64_t x_stride, const float *weight, float eps, float offset,
                                      float *out, int64_t o_stride, int64_t rows, int64_t groups,
                                      int64_t width) {
    const int64_t threads = rows * groups * width < TINY_WORK ? 1 : nm_threads();
    const norm_args a = {x, weight, out, eps, offset, x_stride, o_stride, rows, groups, width, threads};
    nm_for(threads, threads, norm_rows, &a);
}

/* ---- silu(gate) * up, and exp itself ---- */

typedef struct {
    const float *gate_up;
    float *out;
    int64_t rows, inner, shares;
} silu_args;

INLINE V16 silu_times(V16 gate, V16 up) {
    const V16 e = v_exp(v_sub(v_zero(), gate));
    return v_mul(v_div(gate, v_add(v_set1(1.0f), e)), up);
}

NOINLINE void silu_groups(const void *context, int64_t item) {
    const silu_args *a = context;
    const int64_t per_row = (a->inner + 15) / 16, total = per_row * a->rows;
    for (int64_t g = item * total / a->shares; g < (item + 1) * total / a->shares; g++) {
        const int64_t row = g / per_row, at = (g % per_row) * 16, n = min64(16, a->inner - at);
        const float *gate = a->gate_up + row * 2 * a->inner + at, *up = gate + a->inner;
        float *out = a->out + row * a->inner + at;
        if (n == 16) v_store(out, silu_times(v_load(gate), v_load(up)));
        else v_store_part(out, silu_times(v_load_part(gate, n), v_load_part(up, n)), n);
    }
}

static void CAT(silu_mul_, NM_SUFFIX)(const float *gate_up, float *out, int64_t rows, int64_t inner) {
    const int64_t threads = rows * inner < TINY_WORK ? 1 : nm_threads();
    const silu_args a = {gate_up, out, rows, inner, threads};
    nm_for(threads, threads, silu_groups, &a);
}

static void CAT(exp_, NM_SUFFIX)(const float *x, float *out, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v_store(out + i, v_exp(v_load(x + i)));
    if (i < n) v_store_part(out + i, v_exp(v_load_part(x + i, n - i)), n - i);
}

/* ---- rotary embedding in place, keys and values to their pages ---- */

typedef struct {
    float *qkv;
    const float *cos, *sin;
    const int64_t *positions, *slots;
    void *k_pages, *v_pages;
    int64_t stride, rows, heads, kv_heads, head_dim, bf16, shares;
} rope_args;

INLINE void rotate(float *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        const float ac = a * cos[i], bs = b * sin[i], bc = b * cos[i], as = a * sin[i];
        x[i] = ac - bs;
        x[i + half] = bc + as;
    }
}

NOINLINE void rope_rows(const void *context, int64_t item) {
    const rope_args *a = context;
    const int64_t dim = a->head_dim, half = dim / 2;
    for (int64_t row = item * a->rows / a->shares; row < (item + 1) * a->rows / a->shares; row++) {
        const int64_t position = a->positions[row], slot = a->slots[row];
        if (position < 0) continue;
        float *x = a->qkv + row * a->stride;
        for (int64_t h = 0; h < a->heads + a->kv_heads; h++)
            rotate(x + h * dim, a->cos + position * half, a->sin + position * half, half);
        if (slot < 0) continue;
        const float *keys = x + a->heads * dim, *values = keys + a->kv_heads * dim;
        const int64_t page = slot / NM_PAGE, token = slot % NM_PAGE;
        for (int64_t h = 0; h < a->kv_heads; h++, keys += dim, values += dim) {
            const int64_t base = (page * a->kv_heads + h) * NM_PAGE * dim;
            if (a->bf16) {
                uint16_t *k = (uint16_t *)a->k_pages + base + token, *v = (uint16_t *)a->v_pages + base + token * dim;
                for (int64_t d = 0; d < dim; d++) k[d * NM_PAGE] = f32_to_bf16(keys[d]);
                for (int64_t d = 0; d < dim; d++) v[d] = f32_to_bf16(values[d]);
            } else {
                float *k = (float *)a->k_pages + base + token, *v = (float *)a->v_pages + base + token * dim;
                for (int64_t d = 0; d < dim; d++) k[d * NM_PAGE] = keys[d];
                memcpy(v, values, (size_t)dim * sizeof(float));
            }
        }
    }
}

static void CAT(rope_write_, NM_SUFFIX)(float *qkv, int64_t stride, const float *cos, const float *sin,
                                        const int64_t *positions, const int64_t *slots, void *k_pages, void *v_pages,
                                        int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                        int64_t bf16) {
    const int64_t threads = rows < 2 || rows * heads * head_dim < TINY_WORK ? 1 : nm_threads();
    const rope_args a = {qkv,  cos,   sin,      positions, slots, k_pages, v_pages, stride,
                         rows, heads, kv_heads, head_dim,  bf16,  threads};
    nm_for(threads, threads, rope_rows, &a);
}

/* ---- paged attention ----
 *
 * Per row and query head: the visible keys [lo, hi) are cut at absolute multiples of 512. Within a split: scores
 * (chains over head_dim, times scale), their maximum m, e = exp(score - m), l = sum of e in 16 accumulators by key
 * position mod 16 and a fixed tree, o = chains of e * v over the visible keys in order. Splits are merged in order:
 * with M = max(m, m'), a = exp(m - M), b = exp(m' - M): l = fma(l', b, l * a), o = fma(o', b, o * a). The result is
 * o * (1 / l). None of this depends on which other rows share a tile; a tile only decides how often a key is loaded.
 */

#define P_STRIDE (NM_SPLIT + 16) /* not a power of two: rows of the score tile must not share cache sets */

typedef struct {
    int64_t row, rows; /* consecutive rows of one lane at consecutive positions */
    int64_t lo, hi;    /* keys seen by any of them */
    int64_t partial;   /* first partial state of this block */
    int64_t item;      /* first work item of this block */
} row_block;

typedef struct {
    const nm_attention *a;
    const row_block *blocks;
    int64_t count;
    float *partials; /* NULL: a block's splits are walked by one item */
    int *failed;
} attention_args;

INLINE int64_t first_key(const nm_attention *a, int64_t row) {
    return a->window > 0 ? max64(0, a->positions[row] - a->window + 1) : 0;
}

/* A state is m, l, o[head_dim]; m and l lie behind o. */
INLINE int64_t state_size(const nm_attention *a) { return a->head_dim + 16; }

INLINE void merge_state(float *into, const float *from, int64_t dim) {
    const float m1 = into[dim], m2 = from[dim];
    const float m = m1 > m2 ? m1 : m2;
    const float s1 = exp1(m1 - m), s2 = exp1(m2 - m);
    const V16 a = v_set1(s1), b = v_set1(s2);
    into[dim] = m;
    into[dim + 1] = __builtin_fmaf(from[dim + 1], s2, into[dim + 1] * s1);
    for (int64_t d = 0; d < dim; d += 16)
        v_store(into + d, v_fma(v_load(from + d), b, v_mul(v_load(into + d), a)));
}

INLINE void write_row(const nm_attention *a, int64_t row, int64_t head, const float *state) {
    float *out = a->out + row * a->out_stride + head * a->head_dim;
    const V16 inverse = v_set1(1.0f / state[a->head_dim + 1]);
    for (int64_t d = 0; d < a->head_dim; d += 16) v_store(out + d, v_mul(v_load(state + d), inverse));
}

INLINE void run_sums(const nm_attention *a, int64_t rows, const int32_t *table, int64_t lo, int64_t hi,
                     const float *p, const void *values, float *o, int64_t os) {
    if (lo >= hi) return;
    const int bf16 = (int)a->bf16;
    const int64_t dim = a->head_dim, step = a->kv_heads * NM_PAGE * dim;
    int64_t d = 0;
    if (rows <= MR_WIDE)
        for (; d + 32 <= dim; d += 32)
            SUMS[rows - 1][1][bf16](table, lo, hi, p, P_STRIDE, element(values, d, bf16), step, dim, d ? 0 : dim, o + d,
                                    os);
    for (; d < dim; d += 16)
        SUMS[rows - 1][0][bf16](table, lo, hi, p, P_STRIDE, element(values, d, bf16), step, dim, d ? 0 : dim, o + d,
                                os);
}

/* Softmax numerators of keys [lo, hi) (from the split's start) in place; returns their sum, the maximum in *top. */
NOINLINE float softmax_row(float *p, int64_t lo, int64_t hi, float scale, float *top) {
    const V16 s = v_set1(scale), none = v_set1(-INFINITY);
    V16 m = none;
    const int64_t first = lo / 16 * 16;
    for (int64_t k = first; k < hi; k += 16) {
        V16 x = v_mul(v_load(p + k), s);
        if (k < lo || k + 16 > hi) x = v_keep(x, (int)max64(lo - k, 0), (int)min64(hi - k, 16), none);
        v_store(p + k, x);
        m = v_max(m, x);
    }
    *top = v_top(m);
    m = v_set1(*top);
    V16 sum = v_zero();
    for (int64_t k = first; k < hi; k += 16) {
        const V16 e = v_exp(v_sub(v_load(p + k), m));
        v_store(p + k, e);
        sum = v_add(sum, e);
    }
    return v_sum(sum);
}

/* The part of a tile's attention that lies in one split.
 *
 * A tile is `n` <= MR_MAX query vectors of one key-value head; queries [n][head_dim], keys [lo[i], hi[i]) visible to
 * each (absolute), states of `from` strides. States are set (`first`: no split of this row came before) or merged.
 */
NOINLINE void tile_split(const nm_attention *a, int64_t n, const float *queries, const int64_t *row_lo,
                         const int64_t *row_hi, int64_t split, const int32_t *table, int64_t kv_head, float *p,
                         float *fresh, float *states, int64_t state_step, unsigned char *seen) {
    const int bf16 = (int)a->bf16;
    const int64_t dim = a->head_dim, base = split * NM_SPLIT, step = a->kv_heads * NM_PAGE * dim;
    const void *keys = element(a->k_pages, kv_head * NM_PAGE * dim, bf16);
    const void *values = element(a->v_pages, kv_head * NM_PAGE * dim, bf16);
    int64_t lo[MR_MAX], hi[MR_MAX], any_lo = NM_SPLIT, any_hi = 0, all_lo = 0, all_hi = NM_SPLIT;
    for (int64_t i = 0; i < n; i++) {
        lo[i] = max64(row_lo[i] - base, 0);
        hi[i] = min64(row_hi[i] - base, NM_SPLIT);
        all_lo = max64(all_lo, lo[i]);
        all_hi = min64(all_hi, hi[i]);
        if (lo[i] >= hi[i]) continue;
        any_lo = min64(any_lo, lo[i]);
        any_hi = max64(any_hi, hi[i]);
    }
    if (any_lo >= any_hi) return;
    table += base / NM_PAGE;

    const int64_t pages = (any_hi + NM_PAGE - 1) / NM_PAGE;
    for (int64_t page = any_lo / NM_PAGE; page < pages; page += 2) {
        const int pair = page + 1 < pages ? 2 : 1;
        const void *k0 = element(keys, table[page] * step, bf16);
        const void *k1 = pair == 2 ? element(keys, table[page + 1] * step, bf16) : k0;
        const void *n0 = page + 2 < pages ? element(keys, table[page + 2] * step, bf16) : k0;
        const void *n1 = page + 3 < pages ? element(keys, table[page + 3] * step, bf16) : n0;
        run_keys(n, pair, bf16, dim, queries, dim, k0, k1, n0, n1, p + page * NM_PAGE, P_STRIDE);
    }

    const int64_t fresh_step = state_size(a);
    memset(fresh, 0, (size_t)(n * fresh_step) * sizeof(float));
    for (int64_t i = 0; i < n; i++) {
        float *state = fresh + i * fresh_step;
        if (lo[i] < hi[i]) state[dim + 1] = softmax_row(p + i * P_STRIDE, lo[i], hi[i], a->scale, state + dim);
    }

    /* Keys that only some rows see are walked row by row, before and after the common ones: a masked key is never
     * multiplied, and each row's chain runs over its own keys in order. */
    const int common = all_lo < all_hi;
    for (int64_t i = 0; i < n; i++)
        run_sums(a, 1, table, lo[i], common ? all_lo : hi[i], p + i * P_STRIDE, values, fresh + i * fresh_step, 0);
    if (common) {
        run_sums(a, n, table, all_lo, all_hi, p, values, fresh, fresh_step);
        for (int64_t i = 0; i < n; i++)
            run_sums(a, 1, table, all_hi, hi[i], p + i * P_STRIDE, values, fresh + i * fresh_step, 0);
    }

    for (int64_t i = 0; i < n; i++) {
        if (lo[i] >= hi[i]) continue;
        if (seen[i]) merge_state(states + i * state_step, fresh + i * fresh_step, dim);
        else memcpy(states + i * state_step, fresh + i * fresh_step, (size_t)fresh_step * sizeof(float));
        seen[i] = 1;
    }
}

/* One block of rows, one key-value head, and either all its splits (merged and written) or one (left as partials). */
NOINLINE void attention_item(const void *context, int64_t item) {
    const attention_args *args = context;
    const nm_attention *a = args->a;
    const row_block *block = args->blocks;
    item = args->blocks[args->count].item - 1 - item; /* the last rows see most keys: first */
    int64_t low = 0, high = args->count - 1;
    while (low < high) {
        const int64_t mid = (low + high + 1) / 2;
        if (args->blocks[mid].item <= item) low = mid;
        else high = mid - 1;
    }
    block += low;
    item -= block->item;
    const int64_t kv_head = item % a->kv_heads, group = a->heads / a->kv_heads, dim = a->head_dim;
    const int64_t step = state_size(a), vectors = block->rows * group;
    const int64_t begin = block->lo / NM_SPLIT, end = (block->hi - 1) / NM_SPLIT + 1;
    const int64_t from = args->partials ? begin + item / a->kv_heads : begin;
    const int64_t to = args->partials ? from + 1 : end;
    const int32_t *table = a->tables + a->row_lane[block->row] * a->table_width;

    const size_t floats = (size_t)(MR_MAX * P_STRIDE + MR_MAX * dim + MR_MAX * step + vectors * step);
    const size_t bytes = floats * sizeof(float) + (size_t)vectors * (2 * sizeof(int64_t) + 1);
    float *p = nm_scratch(SCRATCH_TILE, bytes);
    if (!p) {
        __atomic_store_n(args->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    float *queries = p + MR_MAX * P_STRIDE, *fresh = queries + MR_MAX * dim, *states = fresh + MR_MAX * step;
    int64_t *lo = (int64_t *)(states + vectors * step), *hi = lo + vectors;
    unsigned char *seen = (unsigned char *)(hi + vectors);
    if (args->partials) states = args->partials + (block->partial + item * vectors) * step;
    for (int64_t v = 0; v < vectors; v++) {
        const int64_t row = block->row + v / group;
        lo[v] = first_key(a, row);
        hi[v] = a->positions[row] + 1;
        seen[v] = 0;
        states[v * step + dim + 1] = 0.0f;
    }
    const int64_t tiles = (vectors + MR_MAX - 1) / MR_MAX;
    for (int64_t split = from; split < to; split++) {
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t v0 = t * vectors / tiles, n = (t + 1) * vectors / tiles - v0;
            for (int64_t i = 0; i < n; i++) {
                const int64_t row = block->row + (v0 + i) / group, head = kv_head * group + (v0 + i) % group;
                memcpy(queries + i * dim, a->q + row * a->q_stride + head * dim, (size_t)dim * sizeof(float));
            }
            tile_split(a, n, queries, lo + v0, hi + v0, split, table, kv_head, p, fresh, states + v0 * step, step,
                       seen + v0);
        }
    }
    if (!args->partials)
        for (int64_t v = 0; v < vectors; v++)
            write_row(a, block->row + v / group, kv_head * group + v % group, states + v * step);
}

/* Merges the partial states of one block and key-value head, in split order. */
NOINLINE void merge_item(const void *context, int64_t item) {
    const attention_args *args = context;
    const nm_attention *a = args->a;
    const row_block *block = args->blocks + item / a->kv_heads;
    const int64_t kv_head = item % a->kv_heads, group = a->heads / a->kv_heads, vectors = block->rows * group;
    const int64_t step = state_size(a), splits = (block->hi - 1) / NM_SPLIT - block->lo / NM_SPLIT + 1;
    for (int64_t v = 0; v < vectors; v++) {
        float *state = NULL;
        for (int64_t s = 0; s < splits; s++) {
            float *next = args->partials + (block->partial + (s * a->kv_heads + kv_head) * vectors + v) * step;
            if (next[a->head_dim + 1] == 0.0f) continue; /* no key of this split is visible to the row */
            if (state) merge_state(state, next, a->head_dim);
            else state = next;
        }
        if (state) write_row(a, block->row + v / group, kv_head * group + v % group, state);
    }
}

static void CAT(attention_, NM_SUFFIX)(const nm_attention *a, int *failed) {
    const int64_t group = a->heads / a->kv_heads, step = state_size(a), threads = nm_threads();
    /* Rows of a block share a walk over the keys; its states should stay in the cache beside them. */
    const int64_t most = min64(64, max64(4, 128 * 1024 / (group * step * 4)));
    row_block *blocks = nm_scratch(SCRATCH_BLOCKS, (size_t)(a->rows + 1) * sizeof(row_block));
    if (!blocks) {
        *failed = 1;
        return;
    }
    int64_t count = 0, items = 0, split_items = 0, partials = 0;
    for (int64_t row = 0; row < a->rows; row++) {
        const int64_t hi = a->positions[row] + 1;
        if (hi <= 0) {
            memset(a->out + row * a->out_stride, 0, (size_t)(a->heads * a->head_dim) * sizeof(float));
            continue;
        }
        row_block *b = blocks + count - 1;
        /* Consecutive positions only: then one of a tile's rows sees each page between its first and last key. */
        if (!count || b->row + b->rows != row || b->rows >= most || a->row_lane[b->row] != a->row_lane[row] ||
            a->positions[row] != a->positions[row - 1] + 1)
            *(b = blocks + count++) = (row_block){row, 0, first_key(a, row), hi, 0, 0};
        b->rows++;
        b->lo = min64(b->lo, first_key(a, row));
        b->hi = max64(b->hi, hi);
    }
    if (!count) return;
    for (int64_t i = 0; i < count; i++) {
        const int64_t splits = (blocks[i].hi - 1) / NM_SPLIT - blocks[i].lo / NM_SPLIT + 1;
        split_items += splits * a->kv_heads;
        partials += splits * a->heads * blocks[i].rows;
    }
    items = count * a->kv_heads;
    attention_args args = {a, blocks, count, NULL, failed};
    if (threads > 1 && items < 4 * threads && split_items > items)
        args.partials = nm_scratch(SCRATCH_SHARED, (size_t)(partials * step) * sizeof(float));
    int64_t item = 0, partial = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t splits = (blocks[i].hi - 1) / NM_SPLIT - blocks[i].lo / NM_SPLIT + 1;
        blocks[i].item = item;
        blocks[i].partial = partial;
        item += a->kv_heads * (args.partials ? splits : 1);
        partial += splits * a->heads * blocks[i].rows;
    }
    blocks[count] = (row_block){0, 0, 0, 0, 0, item};
    nm_for(item, threads, attention_item, &args);
    if (args.partials) nm_for(items, 1, merge_item, &args);
}

const nm_table CAT(nm_table_, NM_SUFFIX) = {
    CAT(linear_, NM_SUFFIX), CAT(rms_norm_, NM_SUFFIX),   CAT(silu_mul_, NM_SUFFIX),
    CAT(exp_, NM_SUFFIX),    CAT(rope_write_, NM_SUFFIX), CAT(attention_, NM_SUFFIX),
};
