/* Dispatch: instruction set, argument checks that guard memory; the exported functions.
 *
 * The functions are called through ctypes, which releases the interpreter lock; the Python module itself is empty.
 */
#include <Python.h>

#include "module.h"
#include "moves.h"
#include "quant.h"

static const nm_table *table = &nm_table_portable;
static nm_quant_linear quant_linear = nm_quant_linear_portable;
static nm_quant_fit quant_fit = nm_quant_fit_portable;

/* ---- instruction sets ---- */

#define ISA_PORTABLE 0
#define ISA_AVX2 1
#define ISA_AVX512 2
#define ISA_AVX512VNNI 3
#define ISA_AVX512BF16 4 /* such machines have VNNI too */

static int64_t usable(void) {
    int64_t mask = 1 << ISA_PORTABLE;
#if defined(__x86_64__) || defined(_M_X64)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        mask |= 1 << ISA_AVX2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            mask |= 1 << ISA_AVX512;
            if (__builtin_cpu_supports("avx512vnni")) {
                mask |= 1 << ISA_AVX512VNNI;
                if (__builtin_cpu_supports("avx512bf16")) mask |= 1 << ISA_AVX512BF16;
            }
        }
    }
#endif
    return mask;
}

EXPORT int64_t nm_abi(void) { return NM_ABI; }
EXPORT int64_t nm_isas(void) { return usable(); }

EXPORT int64_t nm_use(int64_t isa) {
    if (isa < 0 || isa > 4 || !(usable() >> isa & 1)) return -1;
    const nm_table *chosen = &nm_table_portable;
    nm_quant_linear quant = nm_quant_linear_portable;
    nm_quant_fit fit = nm_quant_fit_portable;
#if defined(__x86_64__) || defined(_M_X64)
    if (isa == ISA_AVX2) chosen = &nm_table_avx2;
    if (isa == ISA_AVX512 || isa == ISA_AVX512VNNI) chosen = &nm_table_avx512;
    if (isa == ISA_AVX512BF16) chosen = &nm_table_avx512bf16;
    if (isa == ISA_AVX2) quant = nm_quant_linear_avx2;
    if (isa == ISA_AVX512) quant = nm_quant_linear_avx512;
    if (isa >= ISA_AVX512VNNI) quant = nm_quant_linear_avx512vnni;
    if (isa == ISA_AVX2) fit = nm_quant_fit_avx2;
    if (isa >= ISA_AVX512) fit = nm_quant_fit_avx512;
#endif
    __atomic_store_n(&table, chosen, __ATOMIC_RELEASE);
    __atomic_store_n(&quant_linear, quant, __ATOMIC_RELEASE);
    __atomic_store_n(&quant_fit, fit, __ATOMIC_RELEASE);
    return 0;
}

EXPORT void nm_set_threads(int64_t n) { nm_set_thread_count(n); }

/* ---- kernels ---- */

EXPORT void nm_pack(const nm_part *parts, int64_t count, void *panels, int64_t k, int64_t bf16) {
    nm_pack_panels(parts, count, panels, k, bf16);
}

EXPORT int64_t nm_rows(const nm_matrix *w, const int64_t *ids, float *out, int64_t count) {
    return nm_unpack_rows(w, ids, out, count);
}

EXPORT int64_t nm_linear(const nm_matrix *w, const float *x, int64_t x_stride, const float *residual, int64_t r_stride,
                         float *out, int64_t o_stride, int64_t rows, int64_t limit, int64_t *index, float *value) {
    const nm_peaks peaks = {limit, index, value};
    return table->linear(w, x, x_stride, residual, r_stride, out, o_stride, rows, index ? &peaks : NULL);
}

EXPORT void nm_normalise(const nm_norm *n, int64_t centred) { table->norm(n, centred); }

EXPORT void nm_gated(const float *gate_up, float *out, int64_t rows, int64_t inner, int64_t act) {
    table->gated(gate_up, out, rows, inner, act);
}

EXPORT void nm_activate(const float *x, float *out, int64_t rows, int64_t width, int64_t act) {
    table->activate(x, out, rows, width, act);
}

EXPORT void nm_softcap(float *x, int64_t stride, int64_t rows, int64_t width, float cap, int64_t limit, int64_t *index,
                       float *value) {
    const nm_peaks peaks = {limit, index, value};
    table->softcap(x, stride, rows, width, cap, index ? &peaks : NULL);
}

EXPORT void nm_exp(const float *x, float *out, int64_t n) { table->exp(x, out, n); }

/* Returns 0, or 1 + the first row whose position or slot lies outside its table or pool; nothing is written then. */
EXPORT int64_t nm_rope_write(float *qkv, int64_t stride, const float *cos, const float *sin, int64_t max_position,
                             const int64_t *positions, const int64_t *slots, void *k_pages, void *v_pages,
                             int64_t pages, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                             int64_t half, int64_t bf16) {
    for (int64_t i = 0; i < rows; i++)
        if (positions[i] >= max_position || slots[i] >= pages * NM_PAGE) return i + 1;
    table->rope_write(qkv, stride, cos, sin, positions, slots, k_pages, v_pages, rows, heads, kv_heads, head_dim, half,
                      bf16);
    return 0;
}

/* Returns 0; 1 + the first row whose lane, position, length or block table is out of range, nothing being written then;
 * -1: out of memory, the output is undefined. */
EXPORT int64_t nm_paged_attention(const nm_attention *a) {
    const int64_t most = a->table_width * NM_PAGE;
    int64_t lane = -1, checked_lo = 0, checked_hi = 0; /* pages of `lane` already known to be good */
    for (int64_t i = 0; i < a->rows; i++) {
        if (a->positions[i] < 0) continue;
        if (a->row_lane[i] < 0 || a->row_lane[i] >= a->lanes || a->positions[i] >= most) return i + 1;
        if (a->lengths && (a->lengths[a->row_lane[i]] < 0 || a->lengths[a->row_lane[i]] > most)) return i + 1;
        const int64_t first = nm_first_key(a, i), last = nm_last_key(a, i);
        if (first >= last) continue;
        const int64_t lo = first / NM_PAGE, hi = (last - 1) / NM_PAGE + 1;
        if (a->row_lane[i] != lane || lo < checked_lo || lo > checked_hi) {
            lane = a->row_lane[i];
            checked_lo = checked_hi = lo;
        }
        const int32_t *blocks = a->tables + lane * a->table_width;
        for (; checked_hi < hi; checked_hi++)
            if (blocks[checked_hi] < 0 || blocks[checked_hi] >= a->pages) return i + 1;
    }
    int failed = 0;
    table->attention(a, &failed);
    return failed ? -1 : 0;
}

EXPORT int64_t nm_move(void *payload, void *k_pool, void *v_pool, const int32_t *route, int64_t route_pages,
                       const int64_t *which, int64_t layers, int64_t pool_pages, int64_t kv_heads, int64_t head_dim,
                       int64_t start, int64_t n, int64_t element, int64_t gather) {
    return nm_move_rows(payload, k_pool, v_pool, route, route_pages, which, layers, pool_pages, kv_heads, head_dim,
                        start, n, element, gather);
}

EXPORT int64_t nm_quantised_linear(const nm_quantised *w, const float *x, int64_t x_stride, const float *residual,
                                   int64_t r_stride, float *out, int64_t o_stride, int64_t rows, int64_t limit,
                                   int64_t *index, float *value) {
    const nm_peaks peaks = {limit, index, value};
    return quant_linear(w, x, x_stride, residual, r_stride, out, o_stride, rows, index ? &peaks : NULL);
}

EXPORT int64_t nm_quantise(const nm_part *parts, int64_t count, int64_t k, int64_t format, uint8_t *records,
                           float *units) {
    return quant_fit(parts, count, k, format, records, units);
}

EXPORT int64_t nm_quantised_rows(const nm_quantised *w, const int64_t *ids, float *out, int64_t count) {
    return nm_quant_rows(w, ids, out, count);
}

/* The exclusive or of all words: how fast memory can be read, for `numem bench`. */
EXPORT uint64_t nm_read(const void *from, int64_t bytes) { return nm_read_words(from, bytes); }

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
