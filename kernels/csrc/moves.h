#ifndef NUMEM_MOVES_H
#define NUMEM_MOVES_H

#include "api.h"

/* Packs the rows of parts, stacked, into panels of float32 or bfloat16, rounded to nearest, ties to even. */
void nm_pack_panels(const nm_part *parts, int64_t count, void *panels, int64_t k, int64_t bf16);

/* Elements [k0, k0 + n) of a row of the parts, stacked, as float32. */
void nm_row_f32(const nm_part *parts, int64_t row, int64_t k0, int64_t n, float *out);

/* Rows `ids` of a packed matrix as float32 [count, k]; returns 1 + the index of a bad id, or 0. */
int64_t nm_unpack_rows(const nm_matrix *w, const int64_t *ids, float *out, int64_t count);

/* The exclusive or of the 8-byte words of a buffer whose size is a multiple of 8; every byte is read once. */
uint64_t nm_read_words(const void *from, int64_t bytes);

/* Token rows start .. start + n of a route between a payload of `layers` layers and the page pools. `which` names the
 * pools' layers (NULL: the first `layers`). Returns 0; 1 + the route index of a page outside the pool; -1: the route is
 * too short. Nothing is written unless 0 is returned. */
int64_t nm_move_rows(void *payload, void *k_pool, void *v_pool, const int32_t *route, int64_t route_pages,
                     const int64_t *which, int64_t layers, int64_t pool_pages, int64_t kv_heads, int64_t head_dim,
                     int64_t start, int64_t n, int64_t element, int64_t gather);

#endif
