/* Packing of weights, converted on the way; moves of raw elements (2 or 4 bytes, never interpreted) to and from pages. */
#include "moves.h"

#include <string.h>

#include "api.h"
#include "vec.h"

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

typedef struct {
    const nm_part *parts;
    void *to;
    int64_t n, k;
} pack_args;

/* Exact: the exponent of the shifted bits is 112 too small, denormals included; 31 stands for infinity and NaN. */
INLINE float f16_to_f32(uint16_t h) {
    uint32_t bits = (uint32_t)(h & 0x7fffu) << 13;
    float f;
    memcpy(&f, &bits, 4);
    f *= 0x1p112f;
    memcpy(&bits, &f, 4);
    bits |= (uint32_t)(h & 0x8000u) << 16 | ((h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0);
    memcpy(&f, &bits, 4);
    return f;
}

/* Elements [k0, k0 + n) of a row of a part, converted. */
INLINE void part_f32(const nm_part *part, int64_t row, int64_t k0, int64_t n, float *out) {
    const int64_t at = row * part->stride + k0;
    const uint16_t *half = (const uint16_t *)part->data + at;
    if (part->type == NM_F32) memcpy(out, (const float *)part->data + at, (size_t)n * sizeof(float));
    else if (part->type == NM_F16)
        for (int64_t i = 0; i < n; i++) out[i] = f16_to_f32(half[i]);
    else
        for (int64_t i = 0; i < n; i++) out[i] = bf16_to_f32(half[i]);
}

INLINE void part_bf16(const nm_part *part, int64_t row, int64_t k0, int64_t n, uint16_t *out) {
    const int64_t at = row * part->stride + k0;
    const uint16_t *half = (const uint16_t *)part->data + at;
    if (part->type == NM_BF16) memcpy(out, half, (size_t)n * sizeof(uint16_t));
    else if (part->type == NM_F16)
        for (int64_t i = 0; i < n; i++) out[i] = f32_to_bf16(f16_to_f32(half[i]));
    else
        for (int64_t i = 0; i < n; i++) out[i] = f32_to_bf16(((const float *)part->data)[at + i]);
}

/* The part and its row of column `at` of the matrix, which is in or behind part `first`. */
INLINE const nm_part *find_part(const nm_part *first, int64_t *at) {
    while (*at >= first->rows) *at -= first++->rows;
    return first;
}

void nm_row_f32(const nm_part *parts, int64_t row, int64_t k0, int64_t n, float *out) {
    const nm_part *part = find_part(parts, &row);
    part_f32(part, row, k0, n, out);
}

#define PACK_STEPS 32 /* steps of all columns of a panel that are written before the next ones */

static void pack_panel(const void *context, int64_t panel) {
    const pack_args *a = context;
    float *to = (float *)a->to + panel * NM_PANEL * a->k, row[PACK_STEPS];
    for (int64_t k0 = 0; k0 < a->k; k0 += PACK_STEPS) {
        const int64_t n = min64(PACK_STEPS, a->k - k0);
        for (int64_t c = 0; c < NM_PANEL; c++) {
            int64_t at = panel * NM_PANEL + c;
            if (at < a->n) {
                const nm_part *part = find_part(a->parts, &at);
                part_f32(part, at, k0, n, row);
            } else memset(row, 0, sizeof(row));
            for (int64_t k = 0; k < n; k++) to[(k0 + k) * NM_PANEL + c] = row[k];
        }
    }
}

/* Two consecutive k of a column lie side by side; an odd last k gets a zero partner. */
static void pack_pairs(const void *context, int64_t panel) {
    const pack_args *a = context;
    const int64_t padded = (a->k + 1) / 2 * 2;
    uint16_t *to = (uint16_t *)a->to + panel * NM_PANEL * padded, row[PACK_STEPS];
    for (int64_t k0 = 0; k0 < padded; k0 += PACK_STEPS) {
        const int64_t n = min64(PACK_STEPS, padded - k0);
        for (int64_t c = 0; c < NM_PANEL; c++) {
            int64_t at = panel * NM_PANEL + c;
            memset(row, 0, sizeof(row));
            if (at < a->n) {
                const nm_part *part = find_part(a->parts, &at);
                part_bf16(part, at, k0, min64(n, a->k - k0), row);
            }
            for (int64_t k = 0; k < n; k += 2) memcpy(to + (k0 + k) * NM_PANEL + 2 * c, row + k, 2 * sizeof(uint16_t));
        }
    }
}

void nm_pack_panels(const nm_part *parts, int64_t count, void *panels, int64_t k, int64_t bf16) {
    int64_t n = 0;
    for (int64_t i = 0; i < count; i++) n += parts[i].rows;
    const pack_args a = {parts, panels, n, k};
    nm_for((n + NM_PANEL - 1) / NM_PANEL, nm_threads(), bf16 ? pack_pairs : pack_panel, &a);
}

typedef struct {
    const nm_matrix *w;
    const int64_t *ids;
    float *out;
} rows_args;

static void unpack_row(const void *context, int64_t item) {
    const rows_args *a = context;
    const int64_t k = a->w->k, id = a->ids[item], panel = id / NM_PANEL, column = id % NM_PANEL;
    float *out = a->out + item * k;
    if (a->w->bf16) {
        const uint16_t *from = (const uint16_t *)a->w->panels + panel * NM_PANEL * ((k + 1) / 2 * 2) + 2 * column;
        for (int64_t i = 0; i < k; i++) {
            const uint32_t bits = (uint32_t)from[i / 2 * 2 * NM_PANEL + i % 2] << 16;
            memcpy(out + i, &bits, sizeof(bits));
        }
    } else {
        const float *from = (const float *)a->w->panels + panel * NM_PANEL * k + column;
        for (int64_t i = 0; i < k; i++) out[i] = from[i * NM_PANEL];
    }
}

int64_t nm_unpack_rows(const nm_matrix *w, const int64_t *ids, float *out, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= w->n) return i + 1;
    const rows_args a = {w, ids, out};
    nm_for(count, count < 8 ? 1 : nm_threads(), unpack_row, &a);
    return 0;
}

typedef struct {
    char *payload; /* [2, layers, n, kv_heads * head_dim] */
    char *k_pool;  /* [pool layers, pages, kv_heads, head_dim, 16] */
    char *v_pool;  /* [pool layers, pages, kv_heads, 16, head_dim] */
    const int32_t *route;
    const int64_t *which; /* pool layers of the payload's layers, or NULL: all in order */
    int64_t layers, pool_pages, kv_heads, head_dim, start, n, first_page, pages, gather;
} move_args;

/* Tokens [lo, hi) of a page: a key page is the transpose [kv_heads * head_dim][16] of the rows. */
#define MOVE_KEYS(type)                                                     \
    do {                                                                    \
        type *page = (type *)a->k_pool + at, *row = (type *)a->payload + line; \
        if (a->gather) {                                                    \
            for (int64_t w = 0; w < width; w++)                             \
                for (int64_t t = lo; t < hi; t++) row[(t - lo) * width + w] = page[w * NM_PAGE + t]; \
        } else {                                                            \
            for (int64_t w = 0; w < width; w++)                             \
                for (int64_t t = lo; t < hi; t++) page[w * NM_PAGE + t] = row[(t - lo) * width + w]; \
        }                                                                   \
    } while (0)

static void move_values(const move_args *a, int64_t at, int64_t line, int64_t lo, int64_t hi, int64_t element) {
    const size_t bytes = (size_t)(a->head_dim * element);
    for (int64_t t = lo; t < hi; t++)
        for (int64_t h = 0; h < a->kv_heads; h++) {
            char *page = a->v_pool + (at + (h * NM_PAGE + t) * a->head_dim) * element;
            char *row = a->payload + (line + (t - lo) * a->kv_heads * a->head_dim + h * a->head_dim) * element;
            if (a->gather) memcpy(row, page, bytes);
            else memcpy(page, row, bytes);
        }
}

static void move_page(const move_args *a, int64_t item, int64_t element) {
    const int64_t logical = a->first_page + item % a->pages, slab = item / a->pages;
    const int64_t width = a->kv_heads * a->head_dim;
    const int64_t layer = a->which ? a->which[slab % a->layers] : slab % a->layers;
    const int64_t lo = max64(a->start - logical * NM_PAGE, 0);
    const int64_t hi = min64(a->start + a->n - logical * NM_PAGE, NM_PAGE);
    const int64_t at = (layer * a->pool_pages + a->route[logical]) * width * NM_PAGE;
    const int64_t line = (slab * a->n + logical * NM_PAGE + lo - a->start) * width;
    if (slab >= a->layers) move_values(a, at, line, lo, hi, element);
    else if (element == 4) MOVE_KEYS(uint32_t);
    else MOVE_KEYS(uint16_t);
}

static void move_page4(const void *context, int64_t item) { move_page(context, item, 4); }
static void move_page2(const void *context, int64_t item) { move_page(context, item, 2); }

int64_t nm_move_rows(void *payload, void *k_pool, void *v_pool, const int32_t *route, int64_t route_pages,
                     const int64_t *which, int64_t layers, int64_t pool_pages, int64_t kv_heads, int64_t head_dim,
                     int64_t start, int64_t n, int64_t element, int64_t gather) {
    if (n <= 0) return 0;
    const int64_t first = start / NM_PAGE, last = (start + n - 1) / NM_PAGE;
    if (start < 0 || last >= route_pages) return -1;
    for (int64_t p = first; p <= last; p++)
        if (route[p] < 0 || route[p] >= pool_pages) return p + 1;
    const move_args a = {payload,  k_pool, v_pool, route, which,            layers, pool_pages, kv_heads,
                         head_dim, start,  n,      first, last - first + 1, gather};
    const int64_t items = 2 * layers * a.pages, work = items * kv_heads * head_dim * NM_PAGE;
    nm_for(items, work < 65536 ? 1 : nm_threads(), element == 4 ? move_page4 : move_page2, &a);
    return 0;
}

#define READ_WORDS 8192 /* of one item */

typedef struct {
    const uint64_t *words;
    int64_t count;
    uint64_t *result;
} read_args;

static void read_item(const void *context, int64_t item) {
    const read_args *a = context;
    const uint64_t *from = a->words + item * READ_WORDS;
    const int64_t n = min64(READ_WORDS, a->count - item * READ_WORDS);
    uint64_t lanes[16] = {0}, all = 0;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __builtin_prefetch((const char *)(from + i) + 1024);
        __builtin_prefetch((const char *)(from + i) + 1088);
        for (int j = 0; j < 16; j++) lanes[j] ^= from[i + j];
    }
    for (; i < n; i++) all ^= from[i];
    for (int j = 0; j < 16; j++) all ^= lanes[j];
    __atomic_fetch_xor(a->result, all, __ATOMIC_RELAXED);
}

uint64_t nm_read_words(const void *from, int64_t bytes) {
    uint64_t result = 0;
    const read_args a = {from, bytes / 8, &result};
    nm_for((a.count + READ_WORDS - 1) / READ_WORDS, nm_threads(), read_item, &a);
    return result;
}
