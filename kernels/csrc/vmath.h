/* Elementary functions of sixteen lanes, made of the operations of vec.h: equal bits on every instruction set. */
#ifndef NUMEM_VMATH_H
#define NUMEM_VMATH_H

#include "vec.h"

/* e^x within 1 ulp where the result is normal; 0 below x = -87 (2^-125.5), inf above ln(FLT_MAX), NaN for NaN.
 *
 * x = n ln 2 + r with n = round(x / ln 2), taken from the low bits of x / ln 2 + 1.5 * 2^23; ln 2 in two parts (the
 * first has few enough bits for n times it to be exact); e^r = 1 + r + r^2 q(r), q the minimax polynomial of degree 4
 * on |r| <= ln 2 / 2 (relative error 3.1e-9); the exponent of the result is added as an integer.
 */
INLINE V16 v_exp(V16 x) {
    const V16 magic = v_set1(12582912.0f);
    const V16 t = v_fma(x, v_set1(0x1.715476p+0f), magic);
    const V16 n = v_sub(t, magic);
    V16 r = v_fma(n, v_set1(-0x1.62e400p-1f), x);
    r = v_fma(n, v_set1(-0x1.7f7d1cp-20f), r);
    V16 p = v_set1(0x1.6a2256p-10f);
    p = v_fma(p, r, v_set1(0x1.123b02p-7f));
    p = v_fma(p, r, v_set1(0x1.5558f8p-5f));
    p = v_fma(p, r, v_set1(0x1.555490p-3f));
    p = v_fma(p, r, v_set1(0x1.fffffcp-2f));
    p = v_fma(p, r, v_set1(1.0f));
    p = v_fma(p, r, v_set1(1.0f));
    V16 y = v_scale2(p, t);
    y = v_if_less(x, v_set1(-87.0f), v_zero(), y);
    y = v_if_less(v_set1(0x1.62e42ep+6f), x, v_set1(INFINITY), y);
    return v_if_nan(x, y);
}

INLINE float exp1(float x) {
    float t[16];
    v_store(t, v_exp(v_set1(x)));
    return t[0];
}

/* tanh x within 2 ulp; 1 with the sign of x far out, NaN for NaN.
 *
 * With s = |x|: s + s^3 q(s^2) below 0.55, q the minimax polynomial of degree 4 (relative error of tanh 4.0e-9); from
 * there on 1 - 2 / (e^2s + 1), the definition rewritten, which loses nothing where tanh s > 1 / 2.
 */
INLINE V16 v_tanh(V16 x) {
    const V16 s = v_abs(x), one = v_set1(1.0f), s2 = v_mul(s, s);
    V16 q = v_set1(-0x1.b137c0p-8f);
    q = v_fma(q, s2, v_set1(0x1.5d2270p-6f));
    q = v_fma(q, s2, v_set1(-0x1.b9a04ep-5f));
    q = v_fma(q, s2, v_set1(0x1.110feap-3f));
    q = v_fma(q, s2, v_set1(-0x1.555554p-2f));
    const V16 near = v_fma(v_mul(s, s2), q, s);
    const V16 far = v_sub(one, v_div(v_set1(2.0f), v_add(v_exp(v_add(s, s)), one)));
    return v_signed(v_if_less(s, v_set1(0.55f), near, far), x);
}

/* x / (1 + e^-x). */
INLINE V16 v_silu(V16 x) { return v_div(x, v_add(v_set1(1.0f), v_exp(v_sub(v_zero(), x)))); }

/* x (1 + tanh u) / 2 = x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel 2016). */
INLINE V16 v_gelu_tanh(V16 x) {
    const V16 w = v_fma(v_mul(x, x), v_set1(0x1.2444f2p-4f), v_set1(0x1.988454p+0f));
    return v_div(x, v_add(v_set1(1.0f), v_exp(v_sub(v_zero(), v_mul(x, w)))));
}

/* x P(x), P the normal distribution function, which is erfc(-x / sqrt 2) / 2; within 4e-8 (1 + |x|).
 *
 * With z = |x| the upper tail is e^(-z^2 / 2) p(t), t = 1 / (1 + 0.3 z): the form of Abramowitz and Stegun 7.1.26, with
 * a minimax polynomial of degree 8 of its own, fitted to z in [0, 14] (relative error 5.8e-8).
 */
INLINE V16 v_gelu(V16 x) {
    const V16 z = v_abs(x), one = v_set1(1.0f);
    const V16 t = v_div(one, v_fma(z, v_set1(0x1.333334p-2f), one));
    V16 p = v_set1(0x1.3a6508p-5f);
    p = v_fma(p, t, v_set1(-0x1.5a73aap-3f));
    p = v_fma(p, t, v_set1(0x1.d44b88p-3f));
    p = v_fma(p, t, v_set1(-0x1.395e74p-4f));
    p = v_fma(p, t, v_set1(0x1.23e98ap-3f));
    p = v_fma(p, t, v_set1(0x1.83d2f6p-4f));
    p = v_fma(p, t, v_set1(0x1.f362bap-4f));
    p = v_fma(p, t, v_set1(0x1.e96beep-4f));
    p = v_fma(p, t, v_set1(0x1.e11688p-18f));
    const V16 tail = v_mul(v_exp(v_mul(v_mul(z, z), v_set1(-0.5f))), p);
    return v_mul(x, v_if_less(v_zero(), x, v_sub(one, tail), tail));
}

#endif
