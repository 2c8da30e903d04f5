/* Kernels of single rows: norms, activations, rotary embedding with its page writes. Included per instruction set. */

/* The first min(n, 16) lanes of memory, n > 0. */
INLINE V16 load_some(const float *p, int64_t n) { return n >= 16 ? v_load(p) : v_load_part(p, n); }
INLINE void store_some(float *p, V16 x, int64_t n) {
    if (n >= 16) v_store(p, x);
    else v_store_part(p, x, n);
}

/* ---- norms ---- */

typedef struct {
    const nm_norm *n;
    int64_t shares;
} norm_args;

INLINE void norm_rows(const norm_args *args, int64_t item, const int centred) {
    const nm_norm *a = args->n;
    const int64_t width = a->width, total = a->rows * a->groups;
    const V16 offset = v_set1(a->offset);
    for (int64_t v = item * total / args->shares; v < (item + 1) * total / args->shares; v++) {
        const int64_t row = v / a->groups, at = v % a->groups * width;
        const float *x = a->x + row * a->x_stride + at;
        const float *residual = a->residual ? a->residual + row * a->r_stride + at : NULL;
        float *out = a->out + row * a->o_stride + at;
        V16 acc = v_zero();
        if (centred)
            for (int64_t i = 0; i < width; i += 16) acc = v_add(acc, load_some(x + i, width - i));
        const V16 mean = v_set1(centred ? v_sum(acc) / (float)width : 0.0f);
        acc = v_zero();
        for (int64_t i = 0; i < width; i += 16) {
            V16 d = load_some(x + i, width - i);
            if (centred) {
                d = v_sub(d, mean);
                if (width - i < 16) d = v_keep(d, 0, (int)(width - i), v_zero());
            }
            acc = v_fma(d, d, acc);
        }
        const V16 scale = v_set1(1.0f / sqrtf(v_sum(acc) / (float)width + a->eps));
        for (int64_t i = 0; i < width; i += 16) {
            V16 y = load_some(x + i, width - i);
            if (centred) y = v_sub(y, mean);
            y = v_mul(v_mul(y, scale), v_add(offset, load_some(a->weight + i, width - i)));
            if (a->bias) y = v_add(y, load_some(a->bias + i, width - i));
            if (residual) y = v_add(load_some(residual + i, width - i), y);
            store_some(out + i, y, width - i);
        }
    }
}

NOINLINE void rms_rows(const void *context, int64_t item) { norm_rows(context, item, 0); }
NOINLINE void layer_rows(const void *context, int64_t item) { norm_rows(context, item, 1); }

static void CAT(norm_, NM_SUFFIX)(const nm_norm *n, int64_t centred) {
    const int64_t threads = n->rows * n->groups * n->width < TINY_WORK ? 1 : nm_threads();
    const norm_args a = {n, threads};
    nm_for(threads, threads, centred ? layer_rows : rms_rows, &a);
}

/* ---- activations ---- */

/* Groups of 16 columns of rows of `width`: out = act(x) * factor (no factor: activation alone), or cap tanh(x / cap). */
typedef struct {
    const float *x, *factor;
    float *out;
    int64_t x_stride, o_stride, rows, width, shares;
    float cap;
} act_args;

#define CAPPED 3 /* behind NM_SILU, NM_GELU_TANH, NM_GELU */

INLINE void act_groups(const act_args *a, int64_t item, const int act) {
    const int64_t per_row = (a->width + 15) / 16, total = per_row * a->rows;
    const V16 cap = v_set1(a->cap);
    for (int64_t g = item * total / a->shares; g < (item + 1) * total / a->shares; g++) {
        const int64_t row = g / per_row, at = g % per_row * 16, n = a->width - at;
        V16 y = load_some(a->x + row * a->x_stride + at, n);
        if (act == CAPPED) y = v_mul(cap, v_tanh(v_div(y, cap)));
        else if (act == NM_SILU) y = v_silu(y);
        else if (act == NM_GELU_TANH) y = v_gelu_tanh(y);
        else y = v_gelu(y);
        if (a->factor) y = v_mul(y, load_some(a->factor + row * a->x_stride + at, n));
        store_some(a->out + row * a->o_stride + at, y, n);
    }
}

NOINLINE void silu_groups(const void *context, int64_t item) { act_groups(context, item, NM_SILU); }
NOINLINE void gelu_tanh_groups(const void *context, int64_t item) { act_groups(context, item, NM_GELU_TANH); }
NOINLINE void gelu_groups(const void *context, int64_t item) { act_groups(context, item, NM_GELU); }
NOINLINE void capped_groups(const void *context, int64_t item) { act_groups(context, item, CAPPED); }

static const nm_body ACT_GROUPS[4] = {silu_groups, gelu_tanh_groups, gelu_groups, capped_groups};

INLINE void run_act(act_args a, int64_t act) {
    a.shares = a.rows * a.width < TINY_WORK ? 1 : nm_threads();
    nm_for(a.shares, a.shares, ACT_GROUPS[act], &a);
}

static void CAT(gated_, NM_SUFFIX)(const float *gate_up, float *out, int64_t rows, int64_t inner, int64_t act) {
    run_act((act_args){gate_up, gate_up + inner, out, 2 * inner, inner, rows, inner, 0, 0.0f}, act);
}

static void CAT(activate_, NM_SUFFIX)(const float *x, float *out, int64_t rows, int64_t width, int64_t act) {
    run_act((act_args){x, NULL, out, width, width, rows, width, 0, 0.0f}, act);
}

static void CAT(softcap_, NM_SUFFIX)(float *x, int64_t stride, int64_t rows, int64_t width, float cap,
                                     const nm_peaks *peaks) {
    run_act((act_args){x, NULL, x, stride, stride, rows, width, 0, cap}, CAPPED);
    for (int64_t i = 0; peaks && i < rows; i++) {
        const float *y = x + i * stride;
        peaks->index[i] = argmax_of(y, peaks->limit);
        peaks->value[i] = y[peaks->index[i]];
    }
}

static void CAT(exp_, NM_SUFFIX)(const float *x, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) store_some(out + i, v_exp(load_some(x + i, n - i)), n - i);
}

/* ---- rotary embedding in place, keys and values to their pages ---- */

typedef struct {
    float *qkv;
    const float *cos, *sin;
    const int64_t *positions, *slots;
    void *k_pages, *v_pages;
    int64_t stride, rows, heads, kv_heads, head_dim, half, bf16, shares;
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
    const int64_t dim = a->head_dim, half = a->half;
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
                                        int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t half,
                                        int64_t bf16) {
    const int64_t threads = rows < 2 || rows * heads * head_dim < TINY_WORK ? 1 : nm_threads();
    const rope_args a = {qkv,  cos,   sin,      positions, slots, k_pages, v_pages, stride,
                         rows, heads, kv_heads, head_dim,  half,  bf16,    threads};
    nm_for(threads, threads, rope_rows, &a);
}
