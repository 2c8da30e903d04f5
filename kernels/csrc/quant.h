/* Quantised weights: interface between the dispatcher (module.c), quant.c and the builds of quant.inc.c.
 *
 * Bytes and arithmetic are specified in docs/quantisation.md.
 */
#ifndef NUMEM_QUANT_H
#define NUMEM_QUANT_H

#include "api.h"

#include <string.h>

#define NM_Q8 0
#define NM_Q4 1
#define NM_Q4A 2
#define NM_Q4K 3
#define NM_Q6K 4
#define NM_FORMATS 5

#define NM_STEP 32 /* k of a record, which holds 32 columns */
#define NM_SUPER 8 /* records of a super-block */

/* What a format is made of; functions of a constant, so that kernels fold them away. */
static inline int nm_code_bits(int format) { return format == NM_Q8 ? 8 : format == NM_Q6K ? 6 : 4; }
static inline int nm_zero(int format) { return format == NM_Q8 ? 128 : format == NM_Q4 ? 8 : format == NM_Q6K ? 32 : 0; }
static inline int nm_mins(int format) { return format == NM_Q4A || format == NM_Q4K; }
static inline int nm_nested(int format) { return format == NM_Q4K || format == NM_Q6K; }
static inline int nm_parts(int format) { return format == NM_Q6K ? 2 : 1; } /* scales of 32 weights */
static inline int64_t nm_code_bytes(int format) { return 128 * nm_code_bits(format); }
static inline int64_t nm_scale_bytes(int format) { return 32 * nm_parts(format) * (nm_nested(format) ? 1 : 2); }
static inline int64_t nm_record_bytes(int format) {
    return nm_code_bytes(format) + nm_scale_bytes(format) * (nm_mins(format) ? 2 : 1);
}
static inline int64_t nm_head_bytes(int format) { return nm_nested(format) ? nm_mins(format) ? 128 : 64 : 0; }

/* A quantised weight matrix [n, k]; the memory belongs to the caller. */
typedef struct {
    const uint8_t *records; /* [ceil(n / 32)][spans][bytes of a span] */
    const float *units;     /* [ceil(n / 32) * 32], powers of two */
    const float *bias;      /* [n] or NULL */
    int64_t n;
    int64_t k;
    int64_t format;
} nm_quantised;

static inline int64_t nm_steps(const nm_quantised *w) {
    const int64_t span = nm_nested((int)w->format) ? NM_STEP * NM_SUPER : NM_STEP;
    return (w->k + span - 1) / span * (span / NM_STEP);
}
static inline int64_t nm_panel_bytes(const nm_quantised *w) {
    return nm_steps(w) * nm_record_bytes((int)w->format) + nm_steps(w) / NM_SUPER * nm_head_bytes((int)w->format);
}

/* A finite float16; its denormals too, exactly: (exponent and significand) * 2^112. */
static inline float nm_half(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    uint32_t u = (uint32_t)(h & 0x7fff) << 13;
    float f;
    memcpy(&f, &u, 4);
    f *= 0x1p112f;
    return h & 0x8000 ? -f : f;
}

/* As nm_table.linear: 0, or -1 where there is no memory for scratch. */
typedef int64_t (*nm_quant_linear)(const nm_quantised *w, const float *x, int64_t x_stride, const float *residual,
                                   int64_t r_stride, float *out, int64_t o_stride, int64_t rows, const nm_peaks *peaks);

int64_t nm_quant_linear_portable(const nm_quantised *, const float *, int64_t, const float *, int64_t, float *, int64_t,
                                 int64_t, const nm_peaks *);
#if defined(__x86_64__) || defined(_M_X64)
int64_t nm_quant_linear_avx2(const nm_quantised *, const float *, int64_t, const float *, int64_t, float *, int64_t,
                             int64_t, const nm_peaks *);
int64_t nm_quant_linear_avx512(const nm_quantised *, const float *, int64_t, const float *, int64_t, float *, int64_t,
                               int64_t, const nm_peaks *);
int64_t nm_quant_linear_avx512vnni(const nm_quantised *, const float *, int64_t, const float *, int64_t, float *,
                                   int64_t, int64_t, const nm_peaks *);
#endif

/* Quantises parts, stacked, into planes of their padded size. Returns 0, or 1 + the first row with a NaN or infinity; what
 * was written is useless then. */
typedef int64_t (*nm_quant_fit)(const nm_part *parts, int64_t count, int64_t k, int64_t format, uint8_t *records,
                                float *units);

int64_t nm_quant_fit_portable(const nm_part *, int64_t, int64_t, int64_t, uint8_t *, float *);
#if defined(__x86_64__) || defined(_M_X64)
int64_t nm_quant_fit_avx2(const nm_part *, int64_t, int64_t, int64_t, uint8_t *, float *);
int64_t nm_quant_fit_avx512(const nm_part *, int64_t, int64_t, int64_t, uint8_t *, float *);
#endif

/* Rows `ids` as float32 [count, k]. Returns 0, or 1 + the index of an id outside [0, n); nothing is written then. */
int64_t nm_quant_rows(const nm_quantised *w, const int64_t *ids, float *out, int64_t count);

#endif
