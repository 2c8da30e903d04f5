/* Interface between the dispatcher (module.c) and the builds of kernels.inc.c.
 *
 * Activations are float32 rows (row strides in elements). Weights and pages are float32 or bfloat16 (`bf16` != 0).
 * Rows entering a bfloat16 linear layer are rounded to bfloat16; products of bfloat16 numbers are exact in float32. Every build computes the same bits: sums run in an order fixed by the
 * data's shape alone, and products and sums are fused only where the source says so.
 */
#ifndef NUMEM_API_H
#define NUMEM_API_H

#include <stddef.h>
#include <stdint.h>

#define NM_ABI 14     /* raised with every change of an exported function; native.py checks it */
#define NM_PAGE 16    /* tokens of a page */
#define NM_PANEL 32   /* weight columns of a panel */
#define NM_SPLIT 512  /* keys of an attention split, at absolute multiples */

/* A packed weight matrix [n, k] in panels of 32 columns, padded with zeros: float32 [ceil(n/32)][k][32], bfloat16
 * [ceil(n/32)][ceil(k/2)][32][2]. */
typedef struct {
    const void *panels;
    const float *bias; /* [n] or NULL */
    int64_t n;
    int64_t k;
    int64_t bf16;
} nm_matrix;

#define NM_F32 0
#define NM_F16 1
#define NM_BF16 2

/* Rows of a weight matrix as they lie in a file. */
typedef struct {
    const void *data;
    int64_t rows;
    int64_t stride; /* of two rows, in elements */
    int64_t type;   /* NM_F32, NM_F16 or NM_BF16 */
} nm_part;

/* The largest of the first `limit` elements of each output row, 0 < limit <= n: of equals the first, and the first NaN
 * where there is one. */
typedef struct {
    int64_t limit;
    int64_t *index; /* [rows] */
    float *value;   /* [rows] */
} nm_peaks;

/* Activations. */
#define NM_SILU 0
#define NM_GELU_TANH 1
#define NM_GELU 2

/* Arguments of a norm of float32 rows, each `groups` vectors of `width`: out = ((x - mean) * scale) * (offset + weight)
 * (+ bias) (+ residual), with mean = 0 for the RMS norm. `out` may be `x` or `residual`. */
typedef struct {
    const float *x;
    int64_t x_stride;
    const float *weight;
    const float *bias;     /* [width] or NULL */
    const float *residual; /* or NULL */
    int64_t r_stride;
    float *out;
    int64_t o_stride;
    int64_t rows;
    int64_t groups;
    int64_t width;
    float eps;
    float offset;
} nm_norm;

/* Arguments of paged attention; see numem/kernels/attention.py for the shapes. */
typedef struct {
    const float *q;
    int64_t q_stride;
    const void *k_pages; /* [pages, kv_heads, head_dim, 16] */
    const void *v_pages; /* [pages, kv_heads, 16, head_dim] */
    int64_t pages;
    const int32_t *tables; /* [lanes, table_width] */
    int64_t lanes;
    int64_t table_width;
    const int32_t *row_lane;  /* [rows] */
    const int64_t *positions; /* [rows]; < 0: an idle row */
    float *out;
    int64_t out_stride;
    int64_t rows;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t window; /* keys seen up to a row's own; 0: all */
    /* NULL: causal. Else the keys of each lane, int32 [lanes], and rows see `right` keys behind their own (-1: all). */
    const int32_t *lengths;
    int64_t right;
    int64_t bf16;
    float scale;
    float softcap; /* 0: none */
} nm_attention;

/* Keys [nm_first_key, nm_last_key) are seen by a row, none where they are empty; 0 <= position < 2^31. */
static inline int64_t nm_first_key(const nm_attention *a, int64_t row) {
    const int64_t first = a->positions[row] - a->window + 1;
    return a->window > 0 && first > 0 ? first : 0;
}
static inline int64_t nm_last_key(const nm_attention *a, int64_t row) {
    const int64_t position = a->positions[row];
    if (!a->lengths) return position + 1;
    const int64_t length = a->lengths[a->row_lane[row]];
    return a->right >= 0 && position + a->right + 1 < length ? position + a->right + 1 : length;
}

typedef struct {
    /* 0, or -1: no memory for scratch, nothing was written */
    int64_t (*linear)(const nm_matrix *w, const float *x, int64_t x_stride, const float *residual, int64_t r_stride,
                      float *out, int64_t o_stride, int64_t rows, const nm_peaks *peaks);
    void (*norm)(const nm_norm *n, int64_t centred); /* centred: a layer norm */
    void (*gated)(const float *gate_up, float *out, int64_t rows, int64_t inner, int64_t act);
    void (*activate)(const float *x, float *out, int64_t rows, int64_t width, int64_t act);
    void (*softcap)(float *x, int64_t stride, int64_t rows, int64_t width, float cap, const nm_peaks *peaks);
    void (*exp)(const float *x, float *out, int64_t n);
    void (*rope_write)(float *qkv, int64_t stride, const float *cos, const float *sin, const int64_t *positions,
                       const int64_t *slots, void *k_pages, void *v_pages, int64_t rows, int64_t heads,
                       int64_t kv_heads, int64_t head_dim, int64_t half, int64_t bf16);
    void (*attention)(const nm_attention *a, int *failed); /* failed: set when there is no memory for scratch */
} nm_table;

extern const nm_table nm_table_portable;
#if defined(__x86_64__) || defined(_M_X64)
extern const nm_table nm_table_avx2;
extern const nm_table nm_table_avx512;
extern const nm_table nm_table_avx512bf16;
#endif

/* Runs body(context, i) for each i in [0, items) on at most `threads` threads, the caller among them (pool.c). */
typedef void (*nm_body)(const void *context, int64_t item);
void nm_for(int64_t items, int64_t threads, nm_body body, const void *context);
void nm_set_thread_count(int64_t n);
int64_t nm_threads(void);

/* Floating-point mode of the calling thread. Items of nm_for run in the default mode whatever the host program has set
 * (a flush of denormals on one thread only would make bits depend on threads); bfloat16 layers run in the flushing mode,
 * which is that of the processors' bfloat16 instruction. */
#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#define NM_MODE_DEFAULT 0x1f80u
#define NM_MODE_FLUSH 0x9fc0u
static inline uint64_t nm_float_mode(uint64_t mode) {
    const uint64_t before = _mm_getcsr();
    _mm_setcsr((unsigned)mode);
    return before;
}
#elif defined(__aarch64__)
#define NM_MODE_DEFAULT 0u
#define NM_MODE_FLUSH (1u << 24)
static inline uint64_t nm_float_mode(uint64_t mode) {
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory");
    return before;
}
#else
#define NM_MODE_DEFAULT 0u
#define NM_MODE_FLUSH 0u
static inline uint64_t nm_float_mode(uint64_t mode) { return mode; }
#endif

/* Scratch of the calling thread, 64-byte aligned, grown as needed and kept until the thread ends; slots 0..3 are
 * independent. NULL: out of memory. */
void *nm_scratch(int slot, size_t bytes);

#endif
