/* Sixteen float32 lanes: one AVX-512 register, two AVX registers, or an array. Each operation is one correctly rounded
 * IEEE 754 operation per lane, so the forms give the same bits.
 */
#ifndef NUMEM_VEC_H
#define NUMEM_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline, unused))
#define NOINLINE static __attribute__((noinline, unused))

INLINE float bf16_to_f32(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* Round to nearest, ties to even; any NaN becomes the quiet NaN 0x7fc0. */
INLINE uint16_t f32_to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/* As f32_to_bf16, denormals to zero: the pair instruction takes them for zero. */
INLINE uint16_t f32_to_bf16_normal(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u & 0x7f800000u ? f32_to_bf16(f) : (uint16_t)(u >> 16 & 0x8000u);
}

#if defined(NM_ISA_AVX512)

#include <immintrin.h>
typedef __m512 V16;
#define MR_MAX 12  /* rows of a micro-kernel: 12 x 2 accumulators of the 32 registers */
#define MR_WIDE 12 /* rows up to which a micro-kernel takes 32 columns at once */

INLINE V16 v_zero(void) { return _mm512_setzero_ps(); }
INLINE V16 v_set1(float x) { return _mm512_set1_ps(x); }
INLINE V16 v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, V16 x) { _mm512_storeu_ps(p, x); }
INLINE V16 v_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE V16 v_fma(V16 a, V16 b, V16 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V16 v_add(V16 a, V16 b) { return _mm512_add_ps(a, b); }
INLINE V16 v_sub(V16 a, V16 b) { return _mm512_sub_ps(a, b); }
INLINE V16 v_mul(V16 a, V16 b) { return _mm512_mul_ps(a, b); }
INLINE V16 v_div(V16 a, V16 b) { return _mm512_div_ps(a, b); }
/* a > b ? a : b */
INLINE V16 v_max(V16 a, V16 b) { return _mm512_max_ps(a, b); }
/* x < limit ? a : b */
INLINE V16 v_if_less(V16 x, V16 limit, V16 a, V16 b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), b, a);
}
/* Sizes without signs; `size` (not negative) with the signs of x. */
INLINE V16 v_abs(V16 x) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), x); }
INLINE V16 v_signed(V16 size, V16 x) { return _mm512_or_ps(size, _mm512_and_ps(_mm512_set1_ps(-0.0f), x)); }
/* x is NaN ? x : b */
INLINE V16 v_if_nan(V16 x, V16 b) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), b, x); }
/* Lanes [lo, hi) of x, `fill` elsewhere; 0 <= lo, hi <= 16. */
INLINE V16 v_keep(V16 x, int lo, int hi, V16 fill) {
    return _mm512_mask_blend_ps((__mmask16)(((1u << hi) - 1u) & ~((1u << lo) - 1u)), fill, x);
}
/* p * 2^n by adding n to the exponent bits, n being the low bits of t. */
INLINE V16 v_scale2(V16 p, V16 t) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}

/* Sixteen pairs of bfloat16; v_dot2: acc + odd product, rounded, then + even product, rounded (the instruction's order). */
#if defined(NM_ISA_BF16)
typedef __m512i P16;
INLINE P16 v_pairs(const uint16_t *p) { return _mm512_loadu_si512(p); }
INLINE P16 v_pair1(const uint16_t *p) {
    int32_t both;
    memcpy(&both, p, 4);
    return _mm512_set1_epi32(both);
}
INLINE V16 v_dot2(V16 acc, P16 a, P16 b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
#else
typedef struct {
    __m512 even, odd;
} P16;
INLINE P16 split_pairs(__m512i v) {
    return (P16){_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)),
                 _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000u)))};
}
INLINE P16 v_pairs(const uint16_t *p) { return split_pairs(_mm512_loadu_si512(p)); }
INLINE P16 v_pair1(const uint16_t *p) { return (P16){_mm512_set1_ps(bf16_to_f32(p[0])), _mm512_set1_ps(bf16_to_f32(p[1]))}; }
INLINE V16 v_dot2(V16 acc, P16 a, P16 b) {
    return _mm512_fmadd_ps(a.even, b.even, _mm512_fmadd_ps(a.odd, b.odd, acc));
}
#endif

#elif defined(NM_ISA_AVX2)

#include <immintrin.h>
typedef struct {
    __m256 a, b;
} V16;
#define MR_MAX 6
#define MR_WIDE 3
#define PAIR(op) (V16){op(x.a, y.a), op(x.b, y.b)}

INLINE V16 v_zero(void) { return (V16){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE V16 v_set1(float x) { return (V16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE V16 v_load(const float *p) { return (V16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void v_store(float *p, V16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
INLINE __m256 half_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE V16 v_load_bf16(const uint16_t *p) { return (V16){half_bf16(p), half_bf16(p + 8)}; }
INLINE V16 v_fma(V16 x, V16 y, V16 z) {
    return (V16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INLINE V16 v_add(V16 x, V16 y) { return PAIR(_mm256_add_ps); }
INLINE V16 v_sub(V16 x, V16 y) { return PAIR(_mm256_sub_ps); }
INLINE V16 v_mul(V16 x, V16 y) { return PAIR(_mm256_mul_ps); }
INLINE V16 v_div(V16 x, V16 y) { return PAIR(_mm256_div_ps); }
INLINE V16 v_max(V16 x, V16 y) { return PAIR(_mm256_max_ps); }
INLINE V16 v_if_less(V16 x, V16 l, V16 a, V16 b) {
    return (V16){_mm256_blendv_ps(b.a, a.a, _mm256_cmp_ps(x.a, l.a, _CMP_LT_OQ)),
                 _mm256_blendv_ps(b.b, a.b, _mm256_cmp_ps(x.b, l.b, _CMP_LT_OQ))};
}
INLINE V16 v_abs(V16 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (V16){_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
INLINE V16 v_signed(V16 size, V16 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (V16){_mm256_or_ps(size.a, _mm256_and_ps(sign, x.a)), _mm256_or_ps(size.b, _mm256_and_ps(sign, x.b))};
}
INLINE V16 v_if_nan(V16 x, V16 b) {
    return (V16){_mm256_blendv_ps(b.a, x.a, _mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q)),
                 _mm256_blendv_ps(b.b, x.b, _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))};
}
INLINE V16 v_keep(V16 x, int lo, int hi, V16 fill) {
    const __m256i low = _mm256_set1_epi32(lo), high = _mm256_set1_epi32(hi);
    const __m256i ia = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), ib = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
    const __m256i ka = _mm256_andnot_si256(_mm256_cmpgt_epi32(low, ia), _mm256_cmpgt_epi32(high, ia));
    const __m256i kb = _mm256_andnot_si256(_mm256_cmpgt_epi32(low, ib), _mm256_cmpgt_epi32(high, ib));
    return (V16){_mm256_blendv_ps(fill.a, x.a, _mm256_castsi256_ps(ka)),
                 _mm256_blendv_ps(fill.b, x.b, _mm256_castsi256_ps(kb))};
}
INLINE __m256 half_scale2(__m256 p, __m256 t) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
INLINE V16 v_scale2(V16 p, V16 t) { return (V16){half_scale2(p.a, t.a), half_scale2(p.b, t.b)}; }
typedef struct {
    V16 even, odd;
} P16;
INLINE __m256 half_even(__m256i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
INLINE __m256 half_odd(__m256i v) {
    return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000u)));
}
INLINE P16 v_pairs(const uint16_t *p) {
    const __m256i a = _mm256_loadu_si256((const __m256i *)p), b = _mm256_loadu_si256((const __m256i *)(p + 16));
    return (P16){{half_even(a), half_even(b)}, {half_odd(a), half_odd(b)}};
}
INLINE P16 v_pair1(const uint16_t *p) { return (P16){v_set1(bf16_to_f32(p[0])), v_set1(bf16_to_f32(p[1]))}; }
INLINE V16 v_dot2(V16 acc, P16 a, P16 b) { return v_fma(a.even, b.even, v_fma(a.odd, b.odd, acc)); }
#undef PAIR

#else

typedef struct {
    float f[16];
} V16;
#define MR_MAX 4
#define MR_WIDE 2
#define EACH(expr)                                 \
    V16 r;                                         \
    for (int i = 0; i < 16; i++) r.f[i] = (expr); \
    return r

INLINE V16 v_zero(void) { EACH(0.0f); }
INLINE V16 v_set1(float x) { EACH(x); }
INLINE V16 v_load(const float *p) { EACH(p[i]); }
INLINE void v_store(float *p, V16 x) {
    for (int i = 0; i < 16; i++) p[i] = x.f[i];
}
INLINE V16 v_load_bf16(const uint16_t *p) { EACH(bf16_to_f32(p[i])); }
INLINE V16 v_fma(V16 a, V16 b, V16 c) { EACH(__builtin_fmaf(a.f[i], b.f[i], c.f[i])); }
INLINE V16 v_add(V16 a, V16 b) { EACH(a.f[i] + b.f[i]); }
INLINE V16 v_sub(V16 a, V16 b) { EACH(a.f[i] - b.f[i]); }
INLINE V16 v_mul(V16 a, V16 b) { EACH(a.f[i] * b.f[i]); }
INLINE V16 v_div(V16 a, V16 b) { EACH(a.f[i] / b.f[i]); }
INLINE V16 v_max(V16 a, V16 b) { EACH(a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }
INLINE V16 v_if_less(V16 x, V16 l, V16 a, V16 b) { EACH(x.f[i] < l.f[i] ? a.f[i] : b.f[i]); }
INLINE V16 v_abs(V16 x) { EACH(__builtin_fabsf(x.f[i])); }
INLINE V16 v_signed(V16 size, V16 x) { EACH(__builtin_copysignf(size.f[i], x.f[i])); }
INLINE V16 v_if_nan(V16 x, V16 b) { EACH(x.f[i] != x.f[i] ? x.f[i] : b.f[i]); }
INLINE V16 v_keep(V16 x, int lo, int hi, V16 fill) { EACH(i >= lo && i < hi ? x.f[i] : fill.f[i]); }
INLINE V16 v_scale2(V16 p, V16 t) {
    V16 r;
    for (int i = 0; i < 16; i++) {
        uint32_t a, b;
        memcpy(&a, &p.f[i], 4);
        memcpy(&b, &t.f[i], 4);
        a += b << 23;
        memcpy(&r.f[i], &a, 4);
    }
    return r;
}
#undef EACH

typedef struct {
    V16 even, odd;
} P16;
INLINE P16 v_pairs(const uint16_t *p) {
    P16 r;
    for (int i = 0; i < 16; i++) {
        r.even.f[i] = bf16_to_f32(p[2 * i]);
        r.odd.f[i] = bf16_to_f32(p[2 * i + 1]);
    }
    return r;
}
INLINE P16 v_pair1(const uint16_t *p) { return (P16){v_set1(bf16_to_f32(p[0])), v_set1(bf16_to_f32(p[1]))}; }
INLINE V16 v_dot2(V16 acc, P16 a, P16 b) { return v_fma(a.even, b.even, v_fma(a.odd, b.odd, acc)); }

#endif

/* Fixed tree over the lanes: (i, i+8), (i, i+4), (i, i+2), (0, 1). */
INLINE float v_sum(V16 x) {
    float t[16];
    v_store(t, x);
    for (int i = 0; i < 8; i++) t[i] += t[i + 8];
    for (int i = 0; i < 4; i++) t[i] += t[i + 4];
    for (int i = 0; i < 2; i++) t[i] += t[i + 2];
    return t[0] + t[1];
}

INLINE float v_top(V16 x) {
    float t[16];
    v_store(t, x);
    for (int h = 8; h; h >>= 1)
        for (int i = 0; i < h; i++) t[i] = t[i] > t[i + h] ? t[i] : t[i + h];
    return t[0];
}

/* The first `n` lanes of memory, zeros after them. */
INLINE V16 v_load_part(const float *p, int64_t n) {
    float t[16] = {0};
    memcpy(t, p, (size_t)n * sizeof(float));
    return v_load(t);
}
INLINE void v_store_part(float *p, V16 x, int64_t n) {
    float t[16];
    v_store(t, x);
    memcpy(p, t, (size_t)n * sizeof(float));
}

#endif
