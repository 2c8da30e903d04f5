/* ---- paged attention ----
 *
 * Per row and query head: the visible keys [lo, hi) are cut at absolute multiples of 512. Within a split: scores
 * (chains over head_dim, times scale; with a soft cap c then c * tanh(score / c)), their maximum m, e = exp(score - m),
 * l = sum of e in 16 accumulators by key position mod 16 and a fixed tree, o = chains of e * v over the visible keys in
 * order. Splits are merged in order: with M = max(m, m'), a = exp(m - M), b = exp(m' - M): l = fma(l', b, l * a),
 * o = fma(o', b, o * a). The result is o * (1 / l). None of this depends on which other rows share a tile; a tile only
 * decides how often a key is loaded.
 */

typedef struct {
    int64_t row, rows; /* consecutive rows of one lane at consecutive positions */
    int64_t lo, hi;    /* keys seen by any of them */
    int64_t scores;    /* two phases: vectors times splits of the blocks before */
    int64_t item;      /* two phases: first item of the first */
} row_block;

typedef struct {
    const nm_attention *a;
    const row_block *blocks;
    int64_t count;
    float *scores;  /* two phases: [block][split][kv_heads][vectors][P_STRIDE] */
    int64_t *done;  /* two phases: chunks done of each such split, at the place of its first vector */
    int64_t chunk;  /* two phases: keys of an item of the first, at absolute multiples; divides a split */
    int64_t ranges; /* of columns, an item each */
    int *failed;
} attention_args;

#define MOST_SCORES (64 << 20) /* bytes; what does not fit takes one phase, with equal bits */
#define CHUNK_WORK 32768 /* multiply-adds of an item of the first phase, at least */

INLINE int64_t split_of(const attention_args *args, const row_block *block, int64_t kv_head, int64_t split) {
    const int64_t vectors = block->rows * (args->a->heads / args->a->kv_heads);
    return block->scores + ((split - block->lo / NM_SPLIT) * args->a->kv_heads + kv_head) * vectors;
}

/* The vectors [v0, v0 + n) of a block; `bounds` holds their first and last keys. */
INLINE tile tile_of(const attention_args *args, const row_block *block, int64_t kv_head, int64_t v0, int64_t n,
                    int64_t (*bounds)[MR_MAX]) {
    const nm_attention *a = args->a;
    const int64_t group = a->heads / a->kv_heads;
    for (int64_t i = 0; i < n; i++) {
        bounds[0][i] = nm_first_key(a, block->row + (v0 + i) / group);
        bounds[1][i] = nm_last_key(a, block->row + (v0 + i) / group);
    }
    return (tile){a, n, kv_head, a->tables + a->row_lane[block->row] * a->table_width, bounds[0], bounds[1]};
}

INLINE void copy_queries(const attention_args *args, const row_block *block, int64_t kv_head, int64_t v0, int64_t n,
                         float *queries) {
    const nm_attention *a = args->a;
    const int64_t group = a->heads / a->kv_heads, dim = a->head_dim;
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = block->row + (v0 + i) / group, head = kv_head * group + (v0 + i) % group;
        memcpy(queries + i * Q_STRIDE, a->q + row * a->q_stride + head * dim, (size_t)dim * sizeof(float));
    }
}

/* First phase: the scores of one block and key-value head with the keys of one chunk; the last chunk of a split to be
 * done makes its softmax. */
NOINLINE void score_item(const void *context, int64_t item) {
    const attention_args *args = context;
    const nm_attention *a = args->a;
    int64_t low = 0, high = args->count - 1;
    while (low < high) {
        const int64_t mid = (low + high + 1) / 2;
        if (args->blocks[mid].item <= item) low = mid;
        else high = mid - 1;
    }
    const row_block *block = args->blocks + low;
    item -= block->item;
    const int64_t kv_head = item % a->kv_heads, from = (block->lo / args->chunk + item / a->kv_heads) * args->chunk;
    const int64_t vectors = block->rows * (a->heads / a->kv_heads), tiles = (vectors + MR_MAX - 1) / MR_MAX;
    const int64_t split = from / NM_SPLIT, at = split_of(args, block, kv_head, split);
    float *p = args->scores + at * P_STRIDE, queries[MR_MAX * Q_STRIDE];
    for (int64_t i = 0; i < tiles; i++) {
        int64_t bounds[2][MR_MAX];
        const int64_t v0 = i * vectors / tiles, n = (i + 1) * vectors / tiles - v0;
        const tile t = tile_of(args, block, kv_head, v0, n, bounds);
        copy_queries(args, block, kv_head, v0, n, queries);
        tile_scores(&t, queries, from, from + args->chunk, p + v0 * P_STRIDE);
    }
    const int64_t lo = max64(block->lo, split * NM_SPLIT), hi = min64(block->hi, (split + 1) * NM_SPLIT);
    const int64_t chunks = (hi - 1) / args->chunk - lo / args->chunk + 1;
    if (__atomic_add_fetch(args->done + at, 1, __ATOMIC_ACQ_REL) < chunks) return;
    for (int64_t i = 0; i < tiles; i++) {
        int64_t bounds[2][MR_MAX];
        const int64_t v0 = i * vectors / tiles, n = (i + 1) * vectors / tiles - v0;
        const tile t = tile_of(args, block, kv_head, v0, n, bounds);
        tile_softmax(&t, split, p + v0 * P_STRIDE);
    }
}

/* One block of rows, one key-value head and one range of columns over all splits; with one phase the scores too. */
NOINLINE void attention_item(const void *context, int64_t item) {
    const attention_args *args = context;
    const nm_attention *a = args->a;
    item = args->count * a->kv_heads * args->ranges - 1 - item; /* the last rows see most keys: first */
    const row_block *block = args->blocks + item / (a->kv_heads * args->ranges);
    const int64_t kv_head = item / args->ranges % a->kv_heads, group = a->heads / a->kv_heads;
    const int64_t columns = a->head_dim / args->ranges, column = item % args->ranges * columns;
    const int64_t step = state_size(columns), vectors = block->rows * group;
    const size_t floats = (size_t)(MR_MAX * (P_STRIDE + Q_STRIDE + step) + vectors * step);
    float *p = nm_scratch(SCRATCH_TILE, floats * sizeof(float) + (size_t)vectors);
    if (!p) {
        __atomic_store_n(args->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    float *queries = p + MR_MAX * P_STRIDE, *fresh = queries + MR_MAX * Q_STRIDE, *states = fresh + MR_MAX * step;
    unsigned char *seen = (unsigned char *)(states + vectors * step);
    memset(seen, 0, (size_t)vectors);
    const int64_t tiles = (vectors + MR_MAX - 1) / MR_MAX;
    for (int64_t split = block->lo / NM_SPLIT; split * NM_SPLIT < block->hi; split++)
        for (int64_t i = 0; i < tiles; i++) {
            int64_t bounds[2][MR_MAX];
            const int64_t v0 = i * vectors / tiles, n = (i + 1) * vectors / tiles - v0;
            const tile t = tile_of(args, block, kv_head, v0, n, bounds);
            if (tile_first(&t) >= (split + 1) * NM_SPLIT || tile_last(&t) <= split * NM_SPLIT) continue;
            const float *weights = p;
            if (args->scores) weights = args->scores + (split_of(args, block, kv_head, split) + v0) * P_STRIDE;
            else {
                copy_queries(args, block, kv_head, v0, n, queries);
                tile_scores(&t, queries, split * NM_SPLIT, (split + 1) * NM_SPLIT, p);
                tile_softmax(&t, split, p);
            }
            tile_values(&t, split, weights, column, columns, fresh, states + v0 * step, seen + v0);
        }
    for (int64_t v = 0; v < vectors; v++) {
        const float *state = states + v * step;
        const V16 inverse = v_set1(1.0f / state[columns + 1]);
        float *out = a->out + (block->row + v / group) * a->out_stride;
        out += (kv_head * group + v % group) * a->head_dim + column;
        for (int64_t d = 0; d < columns; d += 16) v_store(out + d, v_mul(v_load(state + d), inverse));
    }
}

/* Many rows: an item walks the keys of its block. Few rows, such as those of a decode step: their scores by chunks of
 * keys, then the rest by ranges of columns, so that the threads have equal shares whatever the lengths. */
static void CAT(attention_, NM_SUFFIX)(const nm_attention *a, int *failed) {
    const int64_t group = a->heads / a->kv_heads, threads = nm_threads();
    /* Rows of a block share a walk over the keys; its states should stay in the cache beside them. */
    const int64_t fitting = min64(64, max64(4, 128 * 1024 / (group * state_size(a->head_dim) * 4)));
    const int64_t most = min64(fitting, max64(max64(MR_MAX / group, 1), a->rows * a->kv_heads / (4 * threads)));
    row_block *blocks = nm_scratch(SCRATCH_BLOCKS, (size_t)a->rows * sizeof(row_block));
    if (!blocks) {
        *failed = 1;
        return;
    }
    int64_t count = 0, work = 0;
    for (int64_t row = 0; row < a->rows; row++) {
        const int idle = a->positions[row] < 0;
        const int64_t lo = idle ? 0 : nm_first_key(a, row), hi = idle ? 0 : nm_last_key(a, row);
        if (lo >= hi) { /* nothing is seen */
            memset(a->out + row * a->out_stride, 0, (size_t)(a->heads * a->head_dim) * sizeof(float));
            continue;
        }
        work += (hi - lo) * a->heads * a->head_dim * 2;
        row_block *b = blocks + count - 1;
        /* Consecutive positions only: then one of a tile's rows sees each page between its first and last key. */
        if (!count || b->row + b->rows != row || b->rows >= most || a->row_lane[b->row] != a->row_lane[row] ||
            a->positions[row] != a->positions[row - 1] + 1)
            *(b = blocks + count++) = (row_block){row, 0, lo, hi, 0, 0};
        b->rows++;
        b->lo = min64(b->lo, lo);
        b->hi = max64(b->hi, hi);
    }
    const int64_t items = count * a->kv_heads;
    attention_args args = {a, blocks, count, NULL, NULL, 64, 1, failed};
    /* The second phase waits for the first and reads scores that other cores wrote: only where threads would idle. */
    if (items >= threads || work < 8 * TINY_WORK) {
        nm_for(items, work < 4 * TINY_WORK ? 1 : threads, attention_item, &args);
        return;
    }
    while (args.chunk < NM_SPLIT && args.chunk * group * a->head_dim < CHUNK_WORK) args.chunk *= 2;
    int64_t chunks = 0, scores = 0;
    for (int64_t i = 0; i < count; i++) {
        row_block *b = blocks + i;
        b->item = chunks;
        b->scores = scores;
        chunks += a->kv_heads * ((b->hi - 1) / args.chunk - b->lo / args.chunk + 1);
        scores += a->heads * b->rows * ((b->hi - 1) / NM_SPLIT - b->lo / NM_SPLIT + 1);
    }
    const size_t bytes = (size_t)scores * P_STRIDE * sizeof(float), counts = (size_t)scores * sizeof(int64_t);
    if (bytes <= MOST_SCORES) args.scores = nm_scratch(SCRATCH_SHARED, bytes + counts);
    if (args.scores) {
        args.done = memset((char *)args.scores + bytes, 0, counts);
        while (items * args.ranges % threads && items * args.ranges < 4 * threads &&
               a->head_dim % (args.ranges * 64) == 0) /* at least 32 columns */
            args.ranges *= 2;
        nm_for(chunks, threads, score_item, &args);
    }
    nm_for(items * args.ranges, threads, attention_item, &args);
}
