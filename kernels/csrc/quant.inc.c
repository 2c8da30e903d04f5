/* Linear layers on quantised weights, compiled once per instruction set: the including file defines NM_ISA_... and
 * NM_SUFFIX.
 *
 * An output is one chain over the blocks of its row of weights, in order, from +0: acc = fma(scale * d, sum, acc), sum
 * being the exact integer sum of products of codes and d the activations' scale; then, where the format has minimums,
 * acc = fma(min, d * (sum of the activations), acc). At the end * unit, + bias, + residual.
 */
#include "quant_vec.h"

#define CAT2(a, b) a##b
#define CAT(a, b) CAT2(a, b)

#define SCRATCH_ROWS 0
#define SCRATCH_SHARED 2

#define TINY_WORK 65536       /* products below which a second thread costs more than it brings */
#define SMALLEST 0x1p-100f    /* a block of activations that lies below counts as zeros */
#define CHUNK_BYTES (384 * 1024) /* quantised activations that stay in the second-level cache */
#define IN_ORDER 2            /* rows up to which codes are read in the order of memory */
#define AHEAD 4096            /* bytes of weights prefetched ahead, to the second level: to the first is slower */

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

/* 32 activations: code 256 * q[0] + q[1], of 16 bits in two bytes. */
typedef struct {
    int8_t q[2][NM_STEP];
    float scale;
    float sum;        /* scale * sum of codes */
    int32_t start[2]; /* -zero * sum of codes, of each part that has its own scale of weights */
} block;

typedef struct {
    const nm_quantised *w;
    const float *x, *residual;
    float *out;
    int64_t x_stride, r_stride, o_stride, rows;
    int64_t steps, panels;
    int64_t shares, chunk; /* an item: a share of the panels by a chunk of the rows */
    block *blocks;         /* [rows][steps] */
    const nm_peaks *peaks;
    int64_t *peaked; /* [shares][rows], columns of the largest, -1 of none; NULL: found at the end */
} quant_args;

/* ---- activations ---- */

/* t = x * (127 / largest); the high byte is t rounded, the low one what is left * 256, within 127, ties to even both.
 * Scale: largest magnitude / 127 / 256. A NaN or infinity makes the scale NaN. Eight bits alone would cost several
 * thousandths of a nat on real models, more than the weights. */
INLINE void quantise_block(const float *x, block *out, const int zero, const int parts) {
    uint32_t bits[NM_STEP];
    int32_t high[NM_STEP], low[NM_STEP], sums[2] = {0, 0};
    memcpy(bits, x, sizeof bits);
    uint32_t most = 0;
    for (int i = 0; i < NM_STEP; i++) {
        const uint32_t size = bits[i] & 0x7fffffffu;
        most = size > most ? size : most;
    }
    float largest;
    memcpy(&largest, &most, 4);
    if (most >= 0x7f800000u || largest < SMALLEST) {
        memset(out, 0, sizeof *out);
        const uint32_t nan = 0x7fc00000u;
        if (most >= 0x7f800000u) {
            memcpy(&out->scale, &nan, 4);
            memcpy(&out->sum, &nan, 4);
        }
        return;
    }
    const float inverse = 127.0f / largest;
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    float t[NM_STEP], rest[NM_STEP];
    for (int i = 0; i < NM_STEP; i++) {
        const float code = x[i] * inverse;
        t[i] = code + magic;
        rest[i] = (code - (t[i] - magic)) * 256.0f + magic;
    }
    memcpy(high, t, sizeof high);
    memcpy(low, rest, sizeof low);
    for (int i = 0; i < NM_STEP; i++) {
        high[i] -= 0x4b400000;
        low[i] -= 0x4b400000;
        low[i] = low[i] > 127 ? 127 : low[i] < -127 ? -127 : low[i];
        out->q[0][i] = (int8_t)high[i];
        out->q[1][i] = (int8_t)low[i];
        high[i] = 256 * high[i] + low[i];
    }
    for (int i = 0; i < NM_STEP / 2; i++) sums[0] += high[i];
    for (int i = NM_STEP / 2; i < NM_STEP; i++) sums[1] += high[i];
    const int32_t sum = sums[0] + sums[1];
    out->scale = largest / 127.0f * 0x1p-8f;
    out->sum = out->scale * (float)sum;
    out->start[0] = -zero * (parts == 1 ? sum : sums[0]);
    out->start[1] = -zero * sums[1];
}

#define ROUND_ROWS 8 /* rows of an item */

NOINLINE void quantise_rows(const void *context, int64_t item) {
    const quant_args *a = context;
    const int format = (int)a->w->format, parts = nm_parts(format);
    const int zero = SIGNED_CODES(nm_code_bits(format)) ? 0 : nm_zero(format);
    const int64_t k = a->w->k, end = min64(a->rows, (item + 1) * ROUND_ROWS);
    for (int64_t row = item * ROUND_ROWS; row < end; row++)
        for (int64_t s = 0; s < a->steps; s++) {
            const float *x = a->x + row * a->x_stride + s * NM_STEP;
            const int64_t left = k - s * NM_STEP;
            float part[NM_STEP] = {0};
            if (left < NM_STEP) {
                if (left > 0) memcpy(part, x, (size_t)left * sizeof(float));
                x = part;
            }
            quantise_block(x, a->blocks + row * a->steps + s, zero, parts);
        }
}

/* ---- tiles: mr rows by TILE_HALVES groups of 16 columns of a panel ---- */

typedef V16 tile_sums[TILE_ROWS][TILE_HALVES];

/* Sums of 4 k (group g of bytes) or of 8 k (vector g of nibbles); g is a constant wherever it is called. */
INLINE void add_codes(const int bits, const int mr, const int part, const int byte, const int g, const int from,
                      const int to, const uint8_t *w, int64_t half, const block *x, int64_t xs,
                      I16 sum[TILE_ROWS][TILE_HALVES]) {
    const int vectors = bits == 4 ? 4 : 2; /* of nibbles, in a part */
    for (int v = from; v < to; v++) {
        if (bits == 8) {
            const B64 codes = b_load(w + (half + v) * 512 + g * 64);
            for (int i = 0; i < mr; i++) sum[i][v] = i_dot(bits, sum[i][v], codes, x[i * xs].q[byte] + 4 * g);
            continue;
        }
        const B64 both = b_load(w + (half + v) * 256 + (part * vectors + g) * 64);
        B64 low = b_low(both), high = b_high(both);
        if (bits == 6) {
            const B64 pairs = b_load(w + 512 + (half + v) * 128 + part * 64);
            low = b_six(low, pairs, g);
            high = b_six(high, pairs, g + 2);
        }
        for (int i = 0; i < mr; i++) {
            const int8_t *q = x[i * xs].q[byte] + 16 * part + 4 * g;
            sum[i][v] = i_dot(bits, sum[i][v], low, q);
            sum[i][v] = i_dot(bits, sum[i][v], high, q + 4 * vectors);
        }
    }
}

INLINE void add_bytes(const int bits, const int mr, const int part, const int byte, const int from, const int to,
                      const uint8_t *w, int64_t half, const block *x, int64_t xs,
                      I16 sum[TILE_ROWS][TILE_HALVES]) {
    add_codes(bits, mr, part, byte, 0, from, to, w, half, x, xs, sum);
    add_codes(bits, mr, part, byte, 1, from, to, w, half, x, xs, sum);
    if (bits == 6) return;
    add_codes(bits, mr, part, byte, 2, from, to, w, half, x, xs, sum);
    add_codes(bits, mr, part, byte, 3, from, to, w, half, x, xs, sum);
    if (bits == 4) return;
    add_codes(bits, mr, part, byte, 4, from, to, w, half, x, xs, sum);
    add_codes(bits, mr, part, byte, 5, from, to, w, half, x, xs, sum);
    add_codes(bits, mr, part, byte, 6, from, to, w, half, x, xs, sum);
    add_codes(bits, mr, part, byte, 7, from, to, w, half, x, xs, sum);
}

/* The high bytes, times 256, then the low bytes. */
INLINE void add_halves(const int bits, const int mr, const int part, const int from, const int to, const uint8_t *w,
                       int64_t half, const block *x, int64_t xs, I16 sum[TILE_ROWS][TILE_HALVES],
                       I16 kept[TILE_ROWS][TILE_HALVES]) {
    add_bytes(bits, mr, part, 0, from, to, w, half, x, xs, sum);
    for (int v = from; v < to; v++)
        for (int i = 0; i < mr; i++) sum[i][v] = i_next(bits, sum[i][v], &kept[i][v]);
    add_bytes(bits, mr, part, 1, from, to, w, half, x, xs, sum);
}

/* The links of one block (or half a block, where that has a scale) of all chains. */
INLINE void add_part(const int format, const int mr, const int part, const uint8_t *w, int64_t half, const block *x,
                     int64_t xs, const V16 *top, const V16 *top_min, tile_sums acc) {
    const int bits = nm_code_bits(format);
    I16 sum[TILE_ROWS][TILE_HALVES], kept[TILE_ROWS][TILE_HALVES];
    for (int i = 0; i < mr; i++)
        for (int v = 0; v < TILE_HALVES; v++) sum[i][v] = i_zero();
    if (mr <= IN_ORDER) {
        for (int v = 0; v < TILE_HALVES; v++) add_halves(bits, mr, part, v, v + 1, w, half, x, xs, sum, kept);
    } else {
        add_halves(bits, mr, part, 0, TILE_HALVES, w, half, x, xs, sum, kept);
    }
    for (int v = 0; v < TILE_HALVES; v++) {
        const uint8_t *at = w + nm_code_bytes(format) + (nm_nested(format) ? 16 : 32) * (half + v) + 32 * part;
        const V16 scale = format == NM_Q4K   ? v_mul(v_u8(at), top[v])
                          : format == NM_Q6K ? v_mul(v_i8(at), top[v])
                                             : v_half(at);
        V16 low = v_zero();
        if (format == NM_Q4A) low = v_half(at + 64);
        if (format == NM_Q4K) low = v_mul(v_i8(at + 32), top_min[v]);
        for (int i = 0; i < mr; i++) {
            const V16 whole = v_of(i_end(bits, sum[i][v], kept[i][v], x[i * xs].start[part]));
            acc[i][v] = v_fma(v_mul(scale, v_set1(x[i * xs].scale)), whole, acc[i][v]);
            if (nm_mins(format)) acc[i][v] = v_fma(low, v_set1(x[i * xs].sum), acc[i][v]);
        }
    }
}

INLINE void quant_tile(const int format, const int mr, int64_t steps, const uint8_t *w, int64_t half, int64_t ahead,
                       const block *x, float *out) {
    const int64_t record = nm_record_bytes(format);
    tile_sums acc;
    V16 top[TILE_HALVES], top_min[TILE_HALVES];
    for (int i = 0; i < mr; i++)
        for (int v = 0; v < TILE_HALVES; v++) acc[i][v] = v_zero();
    for (int v = 0; v < TILE_HALVES; v++) top[v] = top_min[v] = v_zero();
    for (int64_t s = 0; s < steps; s++) {
        if (nm_nested(format) && s % NM_SUPER == 0) {
            for (int v = 0; v < TILE_HALVES; v++) {
                top[v] = v_half(w + 32 * (half + v));
                if (nm_mins(format)) top_min[v] = v_half(w + 64 + 32 * (half + v));
            }
            w += nm_head_bytes(format);
        }
        if (ahead)
            for (int64_t at = 0; at < record; at += 64) __builtin_prefetch(w + ahead + at, 0, 2);
        add_part(format, mr, 0, w, half, x + s, steps, top, top_min, acc);
        if (nm_parts(format) == 2) add_part(format, mr, 1, w, half, x + s, steps, top, top_min, acc);
        w += record;
    }
    for (int i = 0; i < mr; i++)
        for (int v = 0; v < TILE_HALVES; v++) v_store(out + i * NM_PANEL + 16 * v, acc[i][v]);
}

typedef void (*tile_fn)(int64_t steps, const uint8_t *w, int64_t half, int64_t ahead, const block *x, float *out);

#define DEFINE(format, mr)                                                                                         \
    NOINLINE void tile_##format##_##mr(int64_t steps, const uint8_t *w, int64_t half, int64_t ahead, const block *x, \
                                       float *out) {                                                               \
        quant_tile(format, mr, steps, w, half, ahead, x, out);                                                     \
    }
#if TILE_ROWS == 6
#define DEFINE_ALL(f) DEFINE(f, 1) DEFINE(f, 2) DEFINE(f, 3) DEFINE(f, 4) DEFINE(f, 5) DEFINE(f, 6)
#define TILES(f) {tile_##f##_1, tile_##f##_2, tile_##f##_3, tile_##f##_4, tile_##f##_5, tile_##f##_6}
#elif TILE_ROWS == 3
#define DEFINE_ALL(f) DEFINE(f, 1) DEFINE(f, 2) DEFINE(f, 3)
#define TILES(f) {tile_##f##_1, tile_##f##_2, tile_##f##_3}
#else
#define DEFINE_ALL(f) DEFINE(f, 1) DEFINE(f, 2)
#define TILES(f) {tile_##f##_1, tile_##f##_2}
#endif
/* The numbers of the formats, as quant.h has them: macros above paste them. */
DEFINE_ALL(0) DEFINE_ALL(1) DEFINE_ALL(2) DEFINE_ALL(3) DEFINE_ALL(4)
static const tile_fn TILE[NM_FORMATS][TILE_ROWS] = {TILES(0), TILES(1), TILES(2), TILES(3), TILES(4)};

/* ---- the layer ---- */

/* Rows of a tile: with two parts, six rows would not leave registers for the codes. */
static inline int64_t tile_rows(int64_t format) { return format == NM_Q6K && TILE_ROWS > 4 ? 4 : TILE_ROWS; }

INLINE void finish_tile(const quant_args *a, int64_t row, int64_t rows, int64_t column, int64_t columns,
                        const float *acc) {
    for (int64_t c = 0; c < columns; c += 16) {
        const int64_t n = min64(16, columns - c), at = column + c;
        const V16 unit = v_load(a->w->units + at);
        const float *bias = a->w->bias ? a->w->bias + at : NULL;
        const V16 b = !bias ? v_zero() : n == 16 ? v_load(bias) : v_load_part(bias, n);
        for (int64_t i = 0; i < rows; i++) {
            V16 y = v_mul(v_load(acc + i * NM_PANEL + c), unit);
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

/* Index of the largest: of equals the first, and the first NaN where there is one. */
static int64_t largest_of(const float *x, int64_t n) {
    int64_t at = 0;
    for (int64_t i = 1; i < n && x[at] == x[at]; i++)
        if (!(x[i] <= x[at])) at = i;
    return at;
}

NOINLINE void quant_item(const void *context, int64_t item) {
    const quant_args *a = context;
    const nm_quantised *w = a->w;
    const int64_t share = item % a->shares, first = item / a->shares * a->chunk;
    const int64_t rows = min64(a->chunk, a->rows - first), tiles = (rows + tile_rows(w->format) - 1) / tile_rows(w->format);
    const int64_t begin = share * a->panels / a->shares, end = (share + 1) * a->panels / a->shares;
    const int64_t bytes = nm_panel_bytes(w);
    float acc[TILE_ROWS * NM_PANEL];
    for (int64_t panel = begin; panel < end; panel++) {
        const int64_t column = panel * NM_PANEL, columns = min64(NM_PANEL, w->n - column);
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t lo = first + t * rows / tiles, n = first + (t + 1) * rows / tiles - lo;
            const block *x = a->blocks + lo * a->steps;
            for (int half = 0; half < 2 && half * 16 < columns; half += TILE_HALVES)
                TILE[w->format][n - 1](a->steps, w->records + panel * bytes, half, t || half ? 0 : AHEAD, x,
                                       acc + 16 * half);
            finish_tile(a, lo, n, column, columns, acc);
        }
    }
    if (!a->peaked) return;
    /* While the share is in the cache. */
    const int64_t at = begin * NM_PANEL, columns = min64(end * NM_PANEL, a->peaks->limit) - at;
    for (int64_t i = 0; i < rows; i++)
        a->peaked[share * rows + i] = columns > 0 ? at + largest_of(a->out + i * a->o_stride + at, columns) : -1;
}

static void note_peaks(const quant_args *a) {
    for (int64_t i = 0; i < a->rows; i++) {
        const float *x = a->out + i * a->o_stride;
        int64_t best = a->peaked ? a->peaked[i] : largest_of(x, a->peaks->limit);
        for (int64_t share = 1; a->peaked && share < a->shares && x[best] == x[best]; share++) {
            const int64_t at = a->peaked[share * a->rows + i];
            if (at >= 0 && !(x[at] <= x[best])) best = at;
        }
        a->peaks->index[i] = best;
        a->peaks->value[i] = x[best];
    }
}

int64_t CAT(nm_quant_linear_, NM_SUFFIX)(const nm_quantised *w, const float *x, int64_t x_stride, const float *residual,
                                         int64_t r_stride, float *out, int64_t o_stride, int64_t rows,
                                         const nm_peaks *peaks) {
    if (rows <= 0 || w->n <= 0) return 0;
    const int64_t threads = rows * w->n * w->k < TINY_WORK ? 1 : nm_threads();
    quant_args a = {w, x, residual, out, x_stride, r_stride, o_stride, rows, nm_steps(w), (w->n + 31) / 32, 1, rows,
                    NULL, peaks, NULL};
    a.blocks = nm_scratch(SCRATCH_ROWS, (size_t)(rows * a.steps) * sizeof(block));
    if (!a.blocks) return -1;
    /* Shares are handed out one by one, so that a busy core takes fewer; a narrow matrix is cut less finely. */
    if (threads > 1) a.shares = min64(a.panels, a.panels >= 8 * threads ? 4 * threads : threads);
    const int64_t most = CHUNK_BYTES / (a.steps * (int64_t)sizeof(block)) / TILE_ROWS * TILE_ROWS;
    const int64_t chunks = (rows + (most < 48 ? 48 : most) - 1) / (most < 48 ? 48 : most);
    a.chunk = ((rows + chunks - 1) / chunks + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    if (chunks == 1 && peaks) {
        a.peaked = nm_scratch(SCRATCH_SHARED, (size_t)(a.shares * rows) * sizeof(int64_t));
        if (!a.peaked) return -1;
    }
    const int64_t items = (rows + ROUND_ROWS - 1) / ROUND_ROWS;
    nm_for(items, items < 4 ? 1 : threads, quantise_rows, &a);
    nm_for(a.shares * ((rows + a.chunk - 1) / a.chunk), threads, quant_item, &a);
    if (peaks) note_peaks(&a);
    return 0;
}
