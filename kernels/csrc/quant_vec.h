/* Sixty-four bytes of codes and sixteen int32 sums, beside the float lanes of vec.h.
 *
 * A dot takes 4 codes (unsigned) and a byte of 4 activations (signed, within 127) of each lane; between the two bytes
 * of the activations i_next multiplies by 256, and i_end adds -zero * (sum of the activations). All builds give the
 * exact sum, which stays below 2^29:
 * - VNNI has the instruction, and plain C needs none.
 * - The others have products of bytes added in pairs and saturated at 16 bits. Codes of 4 bits: 8 such pairs reach
 *   8 * 2 * 15 * 127 = 30,480, so a whole block is summed in 16 bits. Codes of 6 bits: a pair reaches 16,002. Codes of
 *   8 bits would saturate: the signed code, within 127, gives its sign to the activation (32,258 at most), and the sum
 *   needs no start.
 */
#ifndef NUMEM_QUANT_VEC_H
#define NUMEM_QUANT_VEC_H

#include "quant.h"
#include "vec.h"

INLINE int32_t four(const int8_t *x) {
    int32_t v;
    memcpy(&v, x, 4);
    return v;
}

#if defined(NM_ISA_AVX512)

typedef __m512i B64;
typedef __m512i I16;
INLINE V16 v_min(V16 a, V16 b) { return _mm512_min_ps(a, b); }
#define TILE_ROWS 6
#define TILE_HALVES 2

INLINE B64 b_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
INLINE B64 b_low(B64 x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE B64 b_high(B64 x) { return _mm512_and_si512(_mm512_srli_epi32(x, 4), _mm512_set1_epi8(15)); }
/* nibble | (pairs >> 2j & 3) << 4 */
INLINE B64 b_six(B64 nibble, B64 pairs, const int j) {
    const B64 moved = j < 2 ? _mm512_slli_epi32(pairs, j < 2 ? 4 - 2 * j : 0) : _mm512_srli_epi32(pairs, j < 2 ? 0 : 2 * j - 4);
    return _mm512_or_si512(nibble, _mm512_and_si512(moved, _mm512_set1_epi8(0x30)));
}
INLINE I16 i_zero(void) { return _mm512_setzero_si512(); }
INLINE V16 v_of(I16 x) { return _mm512_cvtepi32_ps(x); }
INLINE V16 v_half(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE V16 v_u8(const uint8_t *p) { return v_of(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE V16 v_i8(const uint8_t *p) { return v_of(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }

#if defined(NM_ISA_VNNI)
#define SIGNED_CODES(bits) 0
INLINE I16 i_dot(const int bits, I16 acc, B64 codes, const int8_t *x) {
    (void)bits;
    return _mm512_dpbusd_epi32(acc, codes, _mm512_set1_epi32(four(x)));
}
INLINE I16 i_next(const int bits, I16 acc, I16 *kept) {
    (void)bits, (void)kept;
    return _mm512_slli_epi32(acc, 8);
}
INLINE I16 i_end(const int bits, I16 acc, I16 kept, int32_t start) {
    (void)bits, (void)kept;
    return _mm512_add_epi32(acc, _mm512_set1_epi32(start));
}
#else
#define SIGNED_CODES(bits) ((bits) == 8)
INLINE I16 i_dot(const int bits, I16 acc, B64 codes, const int8_t *x) {
    const B64 a = _mm512_set1_epi32(four(x)), ones = _mm512_set1_epi16(1);
    if (bits == 4) return _mm512_add_epi16(acc, _mm512_maddubs_epi16(codes, a));
    if (bits == 6) return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(codes, a), ones));
    const B64 w = _mm512_xor_si512(codes, _mm512_set1_epi8(-128));
    const B64 s = _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(w), _mm512_setzero_si512(), a);
    return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_abs_epi8(w), s), ones));
}
/* Sums of 16 bits become sums of 32 and wait in `kept`. */
INLINE I16 i_next(const int bits, I16 acc, I16 *kept) {
    if (bits != 4) return _mm512_slli_epi32(acc, 8);
    *kept = _mm512_slli_epi32(_mm512_madd_epi16(acc, _mm512_set1_epi16(1)), 8);
    return i_zero();
}
INLINE I16 i_end(const int bits, I16 acc, I16 kept, int32_t start) {
    if (bits == 4) acc = _mm512_add_epi32(_mm512_madd_epi16(acc, _mm512_set1_epi16(1)), kept);
    return _mm512_add_epi32(acc, _mm512_set1_epi32(start));
}
#endif

#elif defined(NM_ISA_AVX2)

typedef struct {
    __m256i a, b;
} B64;
typedef B64 I16;
INLINE V16 v_min(V16 x, V16 y) { return (V16){_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
#define TILE_ROWS 3
#define TILE_HALVES 1
#define SIGNED_CODES(bits) ((bits) == 8)

INLINE B64 b_load(const uint8_t *p) {
    return (B64){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))};
}
INLINE B64 b_and(B64 x, int mask) {
    const __m256i m = _mm256_set1_epi8((char)mask);
    return (B64){_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
INLINE B64 b_right(B64 x, const int n) { return (B64){_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)}; }
INLINE B64 b_left(B64 x, const int n) { return (B64){_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
INLINE B64 b_low(B64 x) { return b_and(x, 15); }
INLINE B64 b_high(B64 x) { return b_and(b_right(x, 4), 15); }
INLINE B64 b_six(B64 nibble, B64 pairs, const int j) {
    const B64 high = b_and(j < 2 ? b_left(pairs, j < 2 ? 4 - 2 * j : 0) : b_right(pairs, j < 2 ? 0 : 2 * j - 4), 0x30);
    return (B64){_mm256_or_si256(nibble.a, high.a), _mm256_or_si256(nibble.b, high.b)};
}
INLINE V16 v_of(I16 x) { return (V16){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE __m256 eight_halves(const uint8_t *p) {
    const __m256i h = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(h, _mm256_set1_epi32(0x8000)), 16);
    const __m256i size = _mm256_slli_epi32(_mm256_and_si256(h, _mm256_set1_epi32(0x7fff)), 13);
    const __m256 f = _mm256_mul_ps(_mm256_castsi256_ps(size), _mm256_set1_ps(0x1p112f));
    return _mm256_or_ps(f, _mm256_castsi256_ps(sign));
}
INLINE V16 v_half(const uint8_t *p) { return (V16){eight_halves(p), eight_halves(p + 16)}; }
INLINE V16 v_u8(const uint8_t *p) {
    return v_of((I16){_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)),
                      _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))});
}
INLINE V16 v_i8(const uint8_t *p) {
    return v_of((I16){_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)),
                      _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))});
}
INLINE I16 i_zero(void) { return (I16){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE __m256i half_dot(const int bits, __m256i acc, __m256i codes, __m256i a) {
    const __m256i ones = _mm256_set1_epi16(1);
    if (bits == 4) return _mm256_add_epi16(acc, _mm256_maddubs_epi16(codes, a));
    if (bits == 6) return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, a), ones));
    const __m256i w = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, ones));
}
INLINE I16 i_dot(const int bits, I16 acc, B64 codes, const int8_t *x) {
    const __m256i a = _mm256_set1_epi32(four(x));
    return (I16){half_dot(bits, acc.a, codes.a, a), half_dot(bits, acc.b, codes.b, a)};
}
INLINE I16 i_add(I16 x, I16 y) { return (I16){_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE I16 i_wide(I16 x) {
    const __m256i ones = _mm256_set1_epi16(1);
    return (I16){_mm256_madd_epi16(x.a, ones), _mm256_madd_epi16(x.b, ones)};
}
/* Sums of 16 bits become sums of 32 and wait in `kept`. */
INLINE I16 i_next(const int bits, I16 acc, I16 *kept) {
    if (bits != 4) return b_left(acc, 8);
    *kept = b_left(i_wide(acc), 8);
    return i_zero();
}
INLINE I16 i_end(const int bits, I16 acc, I16 kept, int32_t start) {
    if (bits == 4) acc = i_add(i_wide(acc), kept);
    const __m256i v = _mm256_set1_epi32(start);
    return i_add(acc, (I16){v, v});
}

#else

typedef struct {
    uint8_t b[64];
} B64;
typedef struct {
    int32_t i[16];
} I16;
#define TILE_ROWS 2
#define TILE_HALVES 1
#define SIGNED_CODES(bits) 0
#define EACH(type, field, n, expr)                    \
    type r;                                           \
    for (int i = 0; i < (n); i++) r.field[i] = (expr); \
    return r

INLINE B64 b_load(const uint8_t *p) { EACH(B64, b, 64, p[i]); }
INLINE B64 b_low(B64 x) { EACH(B64, b, 64, x.b[i] & 15); }
INLINE B64 b_high(B64 x) { EACH(B64, b, 64, x.b[i] >> 4); }
INLINE B64 b_six(B64 nibble, B64 pairs, const int j) {
    EACH(B64, b, 64, (uint8_t)(nibble.b[i] | (pairs.b[i] >> 2 * j & 3) << 4));
}
INLINE V16 v_min(V16 a, V16 b) { EACH(V16, f, 16, a.f[i] < b.f[i] ? a.f[i] : b.f[i]); }
INLINE V16 v_of(I16 x) { EACH(V16, f, 16, (float)x.i[i]); }
INLINE V16 v_half(const uint8_t *p) { EACH(V16, f, 16, nm_half(p + 2 * i)); }
INLINE V16 v_u8(const uint8_t *p) { EACH(V16, f, 16, (float)p[i]); }
INLINE V16 v_i8(const uint8_t *p) { EACH(V16, f, 16, (float)(int8_t)p[i]); }
INLINE I16 i_zero(void) { EACH(I16, i, 16, 0); }
INLINE I16 i_dot(const int bits, I16 acc, B64 codes, const int8_t *x) {
    (void)bits;
    EACH(I16, i, 16,
         acc.i[i] + codes.b[4 * i] * x[0] + codes.b[4 * i + 1] * x[1] + codes.b[4 * i + 2] * x[2] +
             codes.b[4 * i + 3] * x[3]);
}
INLINE I16 i_next(const int bits, I16 acc, I16 *kept) {
    (void)bits, (void)kept;
    EACH(I16, i, 16, acc.i[i] * 256);
}
INLINE I16 i_end(const int bits, I16 acc, I16 kept, int32_t start) {
    (void)bits, (void)kept;
    EACH(I16, i, 16, acc.i[i] + start);
}
#undef EACH

#endif

#endif
