/* The exported kernels; their arguments are explained where they are defined. */
#ifndef NUMEM_MODULE_H
#define NUMEM_MODULE_H

#include "api.h"
#include "quant.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT int64_t nm_rows(const nm_matrix *w, const int64_t *ids, float *out, int64_t count);
EXPORT int64_t nm_linear(const nm_matrix *w, const float *x, int64_t x_stride, const float *residual, int64_t r_stride,
                         float *out, int64_t o_stride, int64_t rows, int64_t limit, int64_t *index, float *value);
EXPORT void nm_normalise(const nm_norm *n, int64_t centred);
EXPORT void nm_gated(const float *gate_up, float *out, int64_t rows, int64_t inner, int64_t act);
EXPORT void nm_activate(const float *x, float *out, int64_t rows, int64_t width, int64_t act);
EXPORT int64_t nm_rope_write(float *qkv, int64_t stride, const float *cos, const float *sin, int64_t max_position,
                             const int64_t *positions, const int64_t *slots, void *k_pages, void *v_pages,
                             int64_t pages, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                             int64_t half, int64_t bf16);
EXPORT int64_t nm_paged_attention(const nm_attention *a);
EXPORT int64_t nm_quantised_linear(const nm_quantised *w, const float *x, int64_t x_stride, const float *residual,
                                   int64_t r_stride, float *out, int64_t o_stride, int64_t rows, int64_t limit,
                                   int64_t *index, float *value);
EXPORT int64_t nm_quantised_rows(const nm_quantised *w, const int64_t *ids, float *out, int64_t count);

#endif
