/* Moves of raw elements (2 or 4 bytes, never interpreted): packing of weights, token rows to and from pages. */
#include "moves.h"

#include <string.h>

#include "api.h"

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

typedef struct {
    const void *from;
    void *to;
    int64_t n, k;
} pack_args;

static void pack_panel(const void *context, int64_t panel) {
    const pack_args *a = context;
    const int64_t columns = min64(NM_PANEL, a->n - panel * NM_PANEL);
    const uint32_t *from = (const uint32_t *)a->from + panel * NM_PANEL * a->k;
    uint32_t *to = (uint32_t *)a->to + panel * NM_PANEL * a->k;
    for (int64_t k0 = 0; k0 < a->k; k0 += 16)
        for (int64_t c = 0; c < NM_PANEL; c++)
            for (int64_t k = k0; k < min64(k0 + 16, a->k); k++)
                to[k * NM_PANEL + c] = c < columns ? from[c * a->k + k] : 0;
}

/* Two consecutive k of a column lie side by side; an odd last k gets a zero partner. */
static void pack_pairs(const void *context, int64_t panel) {
    const pack_args *a = context;
    const int64_t columns = min64(NM_PANEL, a->n - panel * NM_PANEL), padded = (a->k + 1) / 2 * 2;
    const uint16_t *from = (const uint16_t *)a->from + panel * NM_PANEL * a->k;
    uint16_t *to = (uint16_t *)a->to + panel * NM_PANEL * padded;
    for (int64_t k0 = 0; k0 < padded; k0 += 32)
        for (int64_t c = 0; c < NM_PANEL; c++)
            for (int64_t k = k0; k < min64(k0 + 32, padded); k++)
                to[k / 2 * 2 * NM_PANEL + 2 * c + k % 2] = c < columns && k < a->k ? from[c * a->k + k] : 0;
}

void nm_pack_panels(const void *weight, void *panels, int64_t n, int64_t k, int64_t element) {
    const pack_args a = {weight, panels, n, k};
    nm_for((n + NM_PANEL - 1) / NM_PANEL, nm_threads(), element == 4 ? pack_panel : pack_pairs, &a);
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
