/* One tile of paged attention: scores, softmax and weighted sums of up to MR_MAX query vectors within a split.
 * Included per instruction set.
 */

/* Distances of two vectors: of scores, their maximum and their sum, and of queries. Constants, so that a micro-kernel
 * addresses all its rows from one register; not powers of two, lest rows share cache sets. */
#define P_STRIDE (NM_SPLIT + 16)
#define Q_STRIDE (256 + 16)

/* ---- scores: p[i][c][key] = fma chain over head_dim of q[i][d] * keys[c][d][key], c in nv pages ----
 *
 * With few rows the pages `ahead` are prefetched meanwhile.
 */
INLINE void scores(const int mr, const int nv, const int bf16, int64_t dim, const float *q, const void *const *keys,
                   const void *const *ahead, float *p) {
    V16 acc[MR_MAX][4];
    for (int i = 0; i < mr; i++)
        for (int c = 0; c < nv; c++) acc[i][c] = v_zero();
#pragma GCC unroll 2
    for (int64_t d = 0; d < dim; d++) {
        V16 b[4];
        for (int c = 0; c < nv; c++) {
            if (mr <= 4) __builtin_prefetch(element(ahead[c], d * NM_PAGE, bf16));
            b[c] = load_weights(keys[c], d * NM_PAGE, bf16);
        }
        for (int i = 0; i < mr; i++) {
            const V16 x = v_set1(q[i * Q_STRIDE + d]);
            for (int c = 0; c < nv; c++) acc[i][c] = v_fma(x, b[c], acc[i][c]);
        }
    }
    for (int i = 0; i < mr; i++)
        for (int c = 0; c < nv; c++) v_store(p + i * P_STRIDE + NM_PAGE * c, acc[i][c]);
}

/* ---- weighted sums: out[i][c] continues its chain over keys [lo, hi) of p[i * P_STRIDE + key] * V[key][c] ----
 *
 * Keys are counted from the split's first key, a multiple of the page size; `table` starts at that page. `values`
 * points at this head's first page and column, `page_step` is the distance of two physical pages, `width` of two keys.
 * With few rows, `ahead` columns of the next page are prefetched meanwhile.
 */
INLINE void sums(const int mr, const int nv, const int bf16, const int32_t *table, int64_t lo, int64_t hi,
                 const float *p, const void *values, int64_t page_step, int64_t width, int64_t ahead, float *out,
                 int64_t os) {
    V16 acc[MR_MAX][4];
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
            V16 b[4];
            for (int c = 0; c < nv; c++) b[c] = load_weights(v, at + 16 * c, bf16);
            for (int i = 0; i < mr; i++) {
                const V16 x = v_set1(p[i * P_STRIDE + key]);
                for (int c = 0; c < nv; c++) acc[i][c] = v_fma(x, b[c], acc[i][c]);
            }
        }
    }
    for (int i = 0; i < mr; i++)
        for (int c = 0; c < nv; c++) v_store(out + i * os + 16 * c, acc[i][c]);
}

typedef void (*scores_fn)(int64_t, const float *, const void *const *, const void *const *, float *);
typedef void (*sums_fn)(const int32_t *, int64_t, int64_t, const float *, const void *, int64_t, int64_t, int64_t,
                        float *, int64_t);

#define DEFINE_WIDTH(mr, nv, bf)                                                                                    \
    NOINLINE void scores_##mr##_##nv##_##bf(int64_t dim, const float *q, const void *const *keys,                   \
                                            const void *const *ahead, float *p) {                                   \
        scores(mr, nv, bf, dim, q, keys, ahead, p);                                                                 \
    }                                                                                                               \
    NOINLINE void sums_##mr##_##nv##_##bf(const int32_t *table, int64_t lo, int64_t hi, const float *p,             \
                                          const void *v, int64_t step, int64_t width, int64_t ahead, float *out,    \
                                          int64_t os) {                                                             \
        sums(mr, nv, bf, table, lo, hi, p, v, step, width, ahead, out, os);                                         \
    }
#define DEFINE_TILE(mr) DEFINE_WIDTH(mr, 1, 0) DEFINE_WIDTH(mr, 1, 1) DEFINE_WIDTH(mr, 2, 0) DEFINE_WIDTH(mr, 2, 1)
#define DEFINE_FEW(mr) DEFINE_WIDTH(mr, 4, 0) DEFINE_WIDTH(mr, 4, 1)
#define SCORES_NAMES(mr) {{scores_##mr##_1_0, scores_##mr##_1_1}, {scores_##mr##_2_0, scores_##mr##_2_1}}
#define SUMS_NAMES(mr) {{sums_##mr##_1_0, sums_##mr##_1_1}, {sums_##mr##_2_0, sums_##mr##_2_1}}
#define SCORES_FEW(mr) {scores_##mr##_4_0, scores_##mr##_4_1}
#define SUMS_FEW(mr) {sums_##mr##_4_0, sums_##mr##_4_1}

/* Rows up to which a micro-kernel takes 64 columns at once. */
#define MR_FEW (MR_WIDE / 2)
#if MR_FEW == 6
#define FOR_FEW(define) define(1) define(2) define(3) define(4) define(5) define(6)
#define EVERY_FEW(names) {names(1), names(2), names(3), names(4), names(5), names(6)}
#elif MR_FEW == 1
#define FOR_FEW(define) define(1)
#define EVERY_FEW(names) {names(1)}
#endif

FOR_ROWS(DEFINE_TILE)
FOR_FEW(DEFINE_FEW)
static const scores_fn SCORES[MR_MAX][2][2] = EVERY(SCORES_NAMES), SCORES_WIDE[MR_FEW][2] = EVERY_FEW(SCORES_FEW);
static const sums_fn SUMS[MR_MAX][2][2] = EVERY(SUMS_NAMES), SUMS_WIDE[MR_FEW][2] = EVERY_FEW(SUMS_FEW);

/* Groups of 16 columns that a micro-kernel of `rows` rows takes of `left`. */
INLINE int taken(int64_t rows, int64_t left) {
    return rows <= MR_FEW && left >= 4 ? 4 : rows <= MR_WIDE && left >= 2 ? 2 : 1;
}

/* A state is o[columns], m, l of one query vector, o being a range of its columns. */
INLINE int64_t state_size(int64_t columns) { return columns + 16; }

INLINE void merge_state(float *into, const float *from, int64_t columns) {
    const float m1 = into[columns], m2 = from[columns];
    const float m = m1 > m2 ? m1 : m2;
    const float s1 = exp1(m1 - m), s2 = exp1(m2 - m);
    const V16 a = v_set1(s1), b = v_set1(s2);
    into[columns] = m;
    into[columns + 1] = __builtin_fmaf(from[columns + 1], s2, into[columns + 1] * s1);
    for (int64_t d = 0; d < columns; d += 16)
        v_store(into + d, v_fma(v_load(from + d), b, v_mul(v_load(into + d), a)));
}

/* Softmax numerators of the scores of keys [lo, hi) (from the split's start) in place; their maximum and sum lie behind
 * the split's keys. */
NOINLINE void softmax_row(float *p, int64_t lo, int64_t hi, float scale, float cap) {
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
    p[NM_SPLIT] = v_top(m);
    m = v_set1(p[NM_SPLIT]);
    V16 sum = v_zero();
    for (int64_t k = first; k < hi; k += 16) {
        const V16 e = v_exp(v_sub(v_load(p + k), m));
        v_store(p + k, e);
        sum = v_add(sum, e);
    }
    p[NM_SPLIT + 1] = v_sum(sum);
}

/* Up to MR_MAX query vectors of one key-value head at consecutive positions of one lane, in the order of their rows;
 * vector i sees the keys [lo[i], hi[i]) (absolute). */
typedef struct {
    const nm_attention *a;
    int64_t n, kv_head;
    const int32_t *table; /* of the lane */
    const int64_t *lo, *hi;
} tile;

/* First and last key that any vector sees. */
INLINE int64_t tile_first(const tile *t) {
    int64_t lo = t->lo[0];
    for (int64_t i = 1; i < t->n; i++) lo = min64(lo, t->lo[i]);
    return lo;
}
INLINE int64_t tile_last(const tile *t) {
    int64_t hi = t->hi[0];
    for (int64_t i = 1; i < t->n; i++) hi = max64(hi, t->hi[i]);
    return hi;
}

/* Scores of queries [n][Q_STRIDE] with the pages of the keys [from, to) of one split that any vector sees. */
NOINLINE void tile_scores(const tile *t, const float *queries, int64_t from, int64_t to, float *p) {
    const int bf16 = (int)t->a->bf16;
    const int64_t dim = t->a->head_dim, size = NM_PAGE * dim, step = t->a->kv_heads * size;
    const void *head = element(t->a->k_pages, t->kv_head * size, bf16);
    const int64_t base = from / NM_SPLIT * NM_SPLIT;
    from = max64(from, tile_first(t));
    to = min64(to, tile_last(t));
    if (from >= to) return;
    const int64_t end = (to - 1) / NM_PAGE + 1;
    for (int64_t page = from / NM_PAGE; page < end;) {
        const int nv = taken(t->n, end - page);
        const void *keys[4], *ahead[4];
        for (int c = 0; c < nv; c++) {
            keys[c] = element(head, t->table[page + c] * step, bf16);
            ahead[c] = page + nv + c < end ? element(head, t->table[page + nv + c] * step, bf16) : keys[c];
        }
        float *out = p + page * NM_PAGE - base;
        if (nv == 4) SCORES_WIDE[t->n - 1][bf16](dim, queries, keys, ahead, out);
        else SCORES[t->n - 1][nv - 1][bf16](dim, queries, keys, ahead, out);
        page += nv;
    }
}

INLINE void run_sums(const tile *t, int64_t rows, int64_t base, int64_t lo, int64_t hi, const float *p, int64_t column,
                     int64_t columns, float *o, int64_t os) {
    if (lo >= hi) return;
    const int bf16 = (int)t->a->bf16;
    const int64_t dim = t->a->head_dim, size = NM_PAGE * dim, step = t->a->kv_heads * size;
    const int32_t *table = t->table + base / NM_PAGE;
    const void *values = element(t->a->v_pages, t->kv_head * size + column, bf16);
    for (int64_t d = 0; d < columns;) {
        const int nv = taken(rows, (columns - d) / 16);
        const sums_fn run = nv == 4 ? SUMS_WIDE[rows - 1][bf16] : SUMS[rows - 1][nv - 1][bf16];
        run(table, lo, hi, p, element(values, d, bf16), step, dim, d ? 0 : columns, o + d, os);
        d += 16 * nv;
    }
}

NOINLINE void tile_softmax(const tile *t, int64_t split, float *p) {
    const int64_t base = split * NM_SPLIT;
    for (int64_t i = 0; i < t->n; i++) {
        const int64_t lo = max64(t->lo[i] - base, 0), hi = min64(t->hi[i] - base, NM_SPLIT);
        if (lo < hi) softmax_row(p + i * P_STRIDE, lo, hi, t->a->scale, t->a->softcap);
    }
}

/* Weighted sums of a range of columns over one split (in `fresh`, [n] states), and `states`, which are set, or merged
 * where `seen` says that a split came before. */
NOINLINE void tile_values(const tile *t, int64_t split, const float *p, int64_t column, int64_t columns, float *fresh,
                          float *states, unsigned char *seen) {
    const int64_t n = t->n, base = split * NM_SPLIT, step = state_size(columns);
    int64_t lo[MR_MAX], hi[MR_MAX], all_lo = 0, all_hi = NM_SPLIT;
    memset(fresh, 0, (size_t)(n * step) * sizeof(float));
    for (int64_t i = 0; i < n; i++) {
        lo[i] = max64(t->lo[i] - base, 0);
        hi[i] = min64(t->hi[i] - base, NM_SPLIT);
        all_lo = max64(all_lo, lo[i]);
        all_hi = min64(all_hi, hi[i]);
        if (lo[i] < hi[i]) memcpy(fresh + i * step + columns, p + i * P_STRIDE + NM_SPLIT, 2 * sizeof(float));
    }

    /* Keys that only some rows see are walked row by row, before and after the common ones: a masked key is never
     * multiplied, and each row's chain runs over its own keys in order. */
    const int common = all_lo < all_hi;
    for (int64_t i = 0; i < n; i++)
        run_sums(t, 1, base, lo[i], common ? all_lo : hi[i], p + i * P_STRIDE, column, columns, fresh + i * step, 0);
    if (common) {
        run_sums(t, n, base, all_lo, all_hi, p, column, columns, fresh, step);
        for (int64_t i = 0; i < n; i++)
            run_sums(t, 1, base, all_hi, hi[i], p + i * P_STRIDE, column, columns, fresh + i * step, 0);
    }

    for (int64_t i = 0; i < n; i++) {
        if (lo[i] >= hi[i]) continue;
        if (seen[i]) merge_state(states + i * step, fresh + i * step, columns);
        else memcpy(states + i * step, fresh + i * step, (size_t)step * sizeof(float));
        seen[i] = 1;
    }
}
