/* ---- paged attention ----
 *
 * Per row and query head: the visible keys [lo, hi) are cut at absolute multiples of 512. Within a split: scores
 * (chains over head_dim, times scale; with a soft cap c then c * tanh(score / c)), their maximum m, e = exp(score - m), l = sum of e in 16 accumulators by key
 * position mod 16 and a fixed tree, o = chains of e * v over the visible keys in order. Splits are merged in order:
 * with M = max(m, m'), a = exp(m - M), b = exp(m' - M): l = fma(l', b, l * a), o = fma(o', b, o * a). The result is
 * o * (1 / l). None of this depends on which other rows share a tile; a tile only decides how often a key is loaded.
 */

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

INLINE void write_row(const nm_attention *a, int64_t row, int64_t head, const float *state) {
    float *out = a->out + row * a->out_stride + head * a->head_dim;
    const V16 inverse = v_set1(1.0f / state[a->head_dim + 1]);
    for (int64_t d = 0; d < a->head_dim; d += 16) v_store(out + d, v_mul(v_load(state + d), inverse));
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
        lo[v] = nm_first_key(a, row);
        hi[v] = nm_last_key(a, row);
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
        const int idle = a->positions[row] < 0;
        const int64_t lo = idle ? 0 : nm_first_key(a, row), hi = idle ? 0 : nm_last_key(a, row);
        if (lo >= hi) { /* nothing is seen */
            memset(a->out + row * a->out_stride, 0, (size_t)(a->heads * a->head_dim) * sizeof(float));
            continue;
        }
        row_block *b = blocks + count - 1;
        /* Consecutive positions only: then one of a tile's rows sees each page between its first and last key. */
        if (!count || b->row + b->rows != row || b->rows >= most || a->row_lane[b->row] != a->row_lane[row] ||
            a->positions[row] != a->positions[row - 1] + 1)
            *(b = blocks + count++) = (row_block){row, 0, lo, hi, 0, 0};
        b->rows++;
        b->lo = min64(b->lo, lo);
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
