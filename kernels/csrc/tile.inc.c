/* One tile of paged attention: scores, softmax and weighted sums of up to MR_MAX query vectors within a split.
 * Included per instruction set.
 */

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

typedef void (*sums_fn)(const int32_t *, int64_t, int64_t, const float *, int64_t, const void *, int64_t, int64_t,
                        int64_t, float *, int64_t);

#define DEFINE_SUMS(mr, nv, bf)                                                                                     \
    DEFINE_CHAINS(keys, NM_PAGE, mr, nv, bf)                                                                        \
    NOINLINE void sums_##mr##_##nv##_##bf(const int32_t *table, int64_t lo, int64_t hi, const float *p, int64_t ps, \
                                          const void *v, int64_t step, int64_t width, int64_t ahead, float *out,    \
                                          int64_t os) {                                                             \
        sums(mr, nv, bf, table, lo, hi, p, ps, v, step, width, ahead, out, os);                                     \
    }
#define DEFINE_TILE(mr) DEFINE_SUMS(mr, 1, 0) DEFINE_SUMS(mr, 2, 0) DEFINE_SUMS(mr, 1, 1) DEFINE_SUMS(mr, 2, 1)
#define KEYS_NAMES(mr) {{keys_##mr##_1_0, keys_##mr##_1_1}, {keys_##mr##_2_0, keys_##mr##_2_1}}
#define SUMS_NAMES(mr) {{sums_##mr##_1_0, sums_##mr##_1_1}, {sums_##mr##_2_0, sums_##mr##_2_1}}

FOR_ROWS(DEFINE_TILE)
static const chains_fn KEY_CHAINS[MR_MAX][2][2] = EVERY(KEYS_NAMES);
static const sums_fn SUMS[MR_MAX][2][2] = EVERY(SUMS_NAMES);

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

#define P_STRIDE (NM_SPLIT + 16) /* not a power of two: rows of the score tile must not share cache sets */

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
NOINLINE float softmax_row(float *p, int64_t lo, int64_t hi, float scale, float cap, float *top) {
    const V16 s = v_set1(scale), c = v_set1(cap), none = v_set1(-INFINITY);
    V16 m = none;
    const int64_t first = lo / 16 * 16;
    for (int64_t k = first; k < hi; k += 16) {
        V16 x = v_mul(v_load(p + k), s);
        if (cap > 0) x = v_mul(c, v_tanh(v_div(x, c)));
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
        if (lo[i] < hi[i]) state[dim + 1] = softmax_row(p + i * P_STRIDE, lo[i], hi[i], a->scale, a->softcap, state + dim);
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
