/* Linear layers: products with packed panels, and the largest of each row. Included per instruction set. */

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

typedef void (*pairs_fn)(int64_t, const uint16_t *, int64_t, const uint16_t *, const uint16_t *, float *, int64_t);

#define DEFINE_PAIRS(mr, nv)                                                                                    \
    NOINLINE void pairs_##mr##_##nv(int64_t n, const uint16_t *x, int64_t xs, const uint16_t *w, const uint16_t *p, \
                                    float *out, int64_t os) {                                                       \
        pairs(mr, nv, n, x, xs, w, p, out, os);                                                                     \
    }
#define DEFINE_PANEL(mr) \
    DEFINE_CHAINS(panel, NM_PANEL, mr, 1, 0) DEFINE_CHAINS(panel, NM_PANEL, mr, 2, 0) DEFINE_PAIRS(mr, 1) DEFINE_PAIRS(mr, 2)
#define PANEL_NAMES(mr) {panel_##mr##_1_0, panel_##mr##_2_0}
#define PAIRS_NAMES(mr) {pairs_##mr##_1, pairs_##mr##_2}

FOR_ROWS(DEFINE_PANEL)
static const chains_fn PANELS[MR_MAX][2] = EVERY(PANEL_NAMES);
static const pairs_fn PAIRS[MR_MAX][2] = EVERY(PAIRS_NAMES);

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
