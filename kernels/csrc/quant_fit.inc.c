/* Quantising of weights, compiled once per instruction set: the including file defines NM_ISA_... and NM_SUFFIX.
 *
 * The search of kernels/grids.py, operation for operation: sixteen rows are the lanes of a vector. Nothing is fused, sums
 * are the same trees, so the bytes are those of the readable reference.
 */
#include "moves.h"
#include "quant_vec.h"

#define LANES 16
#define CHUNK 256      /* weights of a row that are converted at once */
#define TINY 0x1p-100f /* below every scale and sum that is not zero */

typedef struct {
    V16 scale, low, error;
} best;

INLINE V16 of_step(V16 x, float steps) { return v_mul(x, v_set1((float)(1.0 / (double)steps))); }
/* a / b, 0 where b is 0; b is not negative. */
INLINE V16 ratio_of(V16 a, V16 b) { return v_if_less(v_abs(b), v_set1(TINY), v_zero(), v_div(a, b)); }
INLINE V16 inverse_of(V16 scale) { return ratio_of(v_set1(1.0f), scale); }
INLINE V16 smaller(V16 a, V16 b) { return v_if_less(a, b, a, b); }

/* Rounded to float16: adding 1.5 * 2^13 of the number's power of two leaves 11 bits. */
INLINE V16 stored(V16 x) {
    float t[LANES];
    v_store(t, v_abs(x));
    for (int i = 0; i < LANES; i++) {
        uint32_t u;
        float s;
        memcpy(&u, t + i, 4);
        u &= 0x7f800000u;
        u = (u < 0x38800000u ? 0x38800000u : u) + (13u << 23 | 0x400000u);
        memcpy(&s, &u, 4);
        t[i] = t[i] + s - s;
    }
    return v_add(v_signed(v_load(t), x), v_zero()); /* no negative zero */
}

/* To a whole number, ties to even; |x| < 2^22. */
INLINE V16 rounded(V16 x) { return v_sub(v_add(x, v_set1(12582912.0f)), v_set1(12582912.0f)); }
INLINE V16 code_of(V16 x, V16 inverse, const int lowest, const int highest) {
    return rounded(v_min(v_max(v_mul(x, inverse), v_set1((float)lowest)), v_set1((float)highest)));
}

/* Of the elements i, i + 4, i + 8 ... of a block: sums as a tree of (i, i + n / 2), (i, i + n / 4) ... */
INLINE V16 quarter(const V16 *e, const int n) {
    const V16 a = v_add(e[0], e[2]), b = v_add(e[1], e[3]);
    if (n == 4) return v_add(a, b);
    return v_add(v_add(v_add(e[0], e[4]), v_add(e[2], e[6])), v_add(v_add(e[1], e[5]), v_add(e[3], e[7])));
}
INLINE V16 whole(const V16 *q) { return v_add(v_add(q[0], q[2]), v_add(q[1], q[3])); }

/* Takes this scale (and minimum), as stored, where they err less; with a limit, in steps, only where nothing is further off. */
INLINE void offer(const V16 *x, const int n, V16 scale, V16 low, const int lows, const int lowest, const int highest,
                  const float limit, best *b) {
    const V16 inverse = inverse_of(scale);
    V16 far = v_zero(), q[4];
    for (int r = 0; r < 4; r++) {
        V16 e[8];
#pragma GCC unroll 8
        for (int j = 0; j < n / 4; j++) {
            const V16 at = x[r + 4 * j];
            const V16 code = code_of(lows ? v_sub(at, low) : at, inverse, lowest, highest);
            V16 off = v_sub(v_mul(code, scale), at);
            if (lows) off = v_add(off, low);
            if (limit > 0) far = v_max(far, v_abs(off));
            e[j] = v_mul(off, off);
        }
        q[r] = quarter(e, n / 4);
    }
    V16 error = whole(q);
    if (limit > 0) error = v_if_less(v_mul(v_set1(limit), v_abs(scale)), far, v_set1(INFINITY), error);
    b->scale = v_if_less(error, b->error, scale, b->scale);
    if (lows) b->low = v_if_less(error, b->error, low, b->low);
    b->error = v_if_less(error, b->error, error, b->error);
}

INLINE best nothing(void) { return (best){v_zero(), v_zero(), v_set1(INFINITY)}; }

INLINE void codes_of(const V16 *x, const int n, V16 scale, V16 low, const int lows, const int lowest, const int highest,
                     V16 *codes) {
    const V16 inverse = inverse_of(scale);
    for (int i = 0; i < n; i++) codes[i] = code_of(lows ? v_sub(x[i], low) : x[i], inverse, lowest, highest);
}

INLINE V16 sum_of(const V16 *x, const V16 *y, const int n) {
    V16 q[4];
    for (int r = 0; r < 4; r++) {
        V16 e[8];
#pragma GCC unroll 8
        for (int j = 0; j < n / 4; j++) e[j] = y ? v_mul(x[r + 4 * j], y[r + 4 * j]) : x[r + 4 * j];
        q[r] = quarter(e, n / 4);
    }
    return whole(q);
}

INLINE void ends_of(const V16 *x, const int n, V16 *bottom, V16 *top) {
    *bottom = *top = x[0];
    for (int i = 1; i < n; i++) {
        *bottom = smaller(x[i], *bottom);
        *top = v_max(x[i], *top);
    }
}
/* Of both ends the one of larger magnitude, the upper one of equals. */
INLINE V16 peak_of(V16 bottom, V16 top) { return v_if_less(top, v_sub(v_zero(), bottom), bottom, top); }

/* Scales of first, first - by ... steps to the peak, then twice that of least squares. */
INLINE best symmetric(const V16 *x, const int n, const float first, const float by, const int count, const int lowest,
                      const int highest, const float limit) {
    V16 bottom, top, codes[NM_STEP];
    ends_of(x, n, &bottom, &top);
    const V16 peak = peak_of(bottom, top);
    best b = nothing();
    for (int i = 0; i < count; i++) {
        const float steps = first - (float)i * by;
        const V16 scale = stored(of_step(peak, steps));
        if (steps < (float)lowest) offer(x, n, scale, v_zero(), 0, lowest, highest, limit, &b);
        else offer(x, n, scale, v_zero(), 0, lowest, highest, 0, &b);
    }
    for (int i = 0; i < 2; i++) {
        codes_of(x, n, b.scale, v_zero(), 0, lowest, highest, codes);
        const V16 scale = stored(ratio_of(sum_of(codes, x, n), sum_of(codes, codes, n)));
        offer(x, n, scale, v_zero(), 0, lowest, highest, limit, &b);
    }
    return b;
}

static const float Q4A_STEPS[] = {15.0f, 14.0f, 13.0f, 12.0f, 11.0f, 10.0f, 9.0f, 8.0f, 15.5f, 16.0f, 16.5f};
#define COUNT(a) ((int)(sizeof(a) / sizeof(*a)))

NOINLINE best fit_q8(const V16 *x) { return symmetric(x, 32, 127, 1, 32, -127, 127, 0.5625f); }
NOINLINE best fit_q4(const V16 *x) { return symmetric(x, 32, -8.5f, -0.125f, 32, -8, 7, 1.0f); }
NOINLINE best fit_q6(const V16 *x) { return symmetric(x, 16, -32, -1, 13, -32, 31, 1.0f); }

NOINLINE best fit_q4a(const V16 *x) {
    V16 bottom, top, codes[NM_STEP];
    ends_of(x, 32, &bottom, &top);
    const V16 spread = v_sub(top, bottom), part = v_set1(1.0f / 32);
    best b = nothing();
    for (int i = 0; i < COUNT(Q4A_STEPS); i++) {
        const float over = Q4A_STEPS[i] > 15 ? (Q4A_STEPS[i] - 15) / 2 : 0;
        const V16 scale = stored(of_step(spread, Q4A_STEPS[i]));
        offer(x, 32, scale, stored(v_add(bottom, v_mul(v_set1(over), scale))), 1, 0, 15, 0, &b);
    }
    const V16 mean = v_mul(sum_of(x, NULL, 32), part);
    for (int i = 0; i < 2; i++) {
        codes_of(x, 32, b.scale, b.low, 1, 0, 15, codes);
        const V16 middle = v_mul(sum_of(codes, NULL, 32), part);
        for (int j = 0; j < 32; j++) codes[j] = v_sub(codes[j], middle);
        const V16 scale = stored(ratio_of(sum_of(codes, x, 32), sum_of(codes, codes, 32)));
        offer(x, 32, scale, stored(v_sub(mean, v_mul(scale, middle))), 1, 0, 15, 1.0f, &b);
    }
    return b;
}

/* The two multiples of `top` beside x, the one further from zero first, which is never zero unless x is. */
INLINE void multiples(V16 x, V16 top, const float lowest, const float highest, V16 *far, V16 *near) {
    float r[LANES], f[LANES], n[LANES];
    v_store(r, ratio_of(x, top));
    for (int i = 0; i < LANES; i++) {
        n[i] = (float)(int32_t)r[i];
        f[i] = r[i] > n[i] ? n[i] + 1 : r[i] < n[i] ? n[i] - 1 : n[i];
    }
    *far = v_min(v_max(v_load(f), v_set1(lowest)), v_set1(highest));
    *near = v_min(v_max(v_load(n), v_set1(lowest)), v_set1(highest));
}

/* Scales and minimums of a super-block as they are stored: whole multiples of the tops. */
typedef struct {
    V16 scale[16], low[8], top, top_low;
} nested;

NOINLINE void nest_q4k(const V16 *x, const best *b, nested *out) {
    static const float scale_steps[2] = {63, 255}, low_steps[2] = {63, 127};
    V16 most = b[0].scale, size = v_abs(b[0].low), least = v_set1(INFINITY);
    for (int s = 1; s < NM_SUPER; s++) {
        most = v_max(b[s].scale, most);
        size = v_max(v_abs(b[s].low), size);
    }
    for (int t = 0; t < 2; t++) {
        nested now;
        V16 errors[NM_SUPER];
        now.top = stored(of_step(most, scale_steps[t]));
        now.top_low = stored(of_step(size, low_steps[t]));
        for (int s = 0; s < NM_SUPER; s++) {
            const V16 whole_low = v_min(v_max(ratio_of(b[s].low, now.top_low), v_set1(-127)), v_set1(127));
            V16 far, near;
            best found = nothing();
            now.low[s] = rounded(whole_low);
            const V16 low = v_mul(now.low[s], now.top_low);
            multiples(b[s].scale, now.top, 0, 255, &far, &near);
            offer(x + 32 * s, 32, v_mul(far, now.top), low, 1, 0, 15, 0, &found);
            offer(x + 32 * s, 32, v_mul(near, now.top), low, 1, 0, 15, 1.0f, &found);
            now.scale[s] = rounded(ratio_of(found.scale, now.top));
            errors[s] = found.error;
        }
        const V16 a = v_add(v_add(errors[0], errors[4]), v_add(errors[2], errors[6]));
        const V16 total = v_add(a, v_add(v_add(errors[1], errors[5]), v_add(errors[3], errors[7])));
        if (t == 0) *out = now;
        for (int s = 0; s < NM_SUPER && t; s++) {
            out->scale[s] = v_if_less(total, least, now.scale[s], out->scale[s]);
            out->low[s] = v_if_less(total, least, now.low[s], out->low[s]);
        }
        out->top = v_if_less(total, least, now.top, out->top);
        out->top_low = v_if_less(total, least, now.top_low, out->top_low);
        least = smaller(total, least);
    }
}

NOINLINE void nest_q6k(const V16 *x, const best *b, nested *out) {
    V16 bottom = b[0].scale, top = b[0].scale;
    for (int s = 1; s < 16; s++) {
        bottom = smaller(b[s].scale, bottom);
        top = v_max(b[s].scale, top);
    }
    out->top = stored(of_step(peak_of(bottom, top), -128));
    for (int s = 0; s < 16; s++) {
        V16 far, near;
        best found = nothing();
        multiples(b[s].scale, out->top, -128, 127, &far, &near);
        offer(x + 16 * s, 16, v_mul(far, out->top), v_zero(), 0, -32, 31, 0, &found);
        offer(x + 16 * s, 16, v_mul(near, out->top), v_zero(), 0, -32, 31, 1.0f, &found);
        out->scale[s] = rounded(ratio_of(found.scale, out->top));
    }
}

/* ---- bytes: `to` is at column 0 of the panel, `first` the column of lane 0 ---- */

static void put_halves(uint8_t *to, V16 x) {
    float t[LANES];
    v_store(t, x);
    for (int i = 0; i < LANES; i++) {
        uint32_t u;
        const float small = fabsf(t[i]) * 0x1p-112f; /* exact, denormals included */
        memcpy(&u, &small, 4);
        const uint16_t h = (uint16_t)(u >> 13 | (signbit(t[i]) ? 0x8000u : 0));
        memcpy(to + 2 * i, &h, 2);
    }
}
static void put_bytes(uint8_t *to, V16 x) {
    float t[LANES];
    v_store(t, x);
    for (int i = 0; i < LANES; i++) to[i] = (uint8_t)(int32_t)t[i];
}

static void put_codes(const int format, uint8_t *record, int64_t half, const V16 *codes) {
    uint32_t w[8][LANES];
    for (int g = 0; g < 8; g++) {
        float t[4][LANES];
        for (int j = 0; j < 4; j++) v_store(t[j], v_add(codes[4 * g + j], v_set1((float)nm_zero(format))));
        for (int i = 0; i < LANES; i++)
            w[g][i] = (uint32_t)((int32_t)t[0][i] | (int32_t)t[1][i] << 8 | (int32_t)t[2][i] << 16) |
                      (uint32_t)(int32_t)t[3][i] << 24;
    }
    if (nm_code_bits(format) == 8) {
        memcpy(record + half * 512, w, sizeof w);
        return;
    }
    uint32_t packed[4][LANES], pairs[2][LANES];
    if (nm_code_bits(format) == 4) {
        for (int g = 0; g < 4; g++)
            for (int i = 0; i < LANES; i++) packed[g][i] = w[g][i] | w[g + 4][i] << 4;
    } else {
        for (int p = 0; p < 2; p++)
            for (int i = 0; i < LANES; i++) {
                const uint32_t low = 0x0f0f0f0fu, high = 0x03030303u;
                for (int g = 0; g < 2; g++)
                    packed[2 * p + g][i] = (w[4 * p + g][i] & low) | (w[4 * p + g + 2][i] & low) << 4;
                pairs[p][i] = 0;
                for (int g = 0; g < 4; g++) pairs[p][i] |= (w[4 * p + g][i] >> 4 & high) << 2 * g;
            }
        memcpy(record + 512 + half * 128, pairs, sizeof pairs);
    }
    memcpy(record + half * 256, packed, sizeof packed);
}

/* Sixteen rows by a span, in units. */
INLINE void fit_span(const int format, const V16 *x, int64_t half, uint8_t *to) {
    const int steps = nm_nested(format) ? NM_SUPER : 1, parts = nm_parts(format), size = NM_STEP / parts;
    const int lowest = format == NM_Q8 ? -127 : -nm_zero(format), highest = (1 << nm_code_bits(format)) - 1 - nm_zero(format);
    best b[2 * NM_SUPER];
    nested n;
    for (int s = 0; s < steps * parts; s++)
        b[s] = format == NM_Q8    ? fit_q8(x + size * s)
               : format == NM_Q4  ? fit_q4(x + size * s)
               : format == NM_Q6K ? fit_q6(x + size * s)
                                  : fit_q4a(x + size * s);
    if (format == NM_Q4K) nest_q4k(x, b, &n);
    if (format == NM_Q6K) nest_q6k(x, b, &n);
    if (nm_nested(format)) {
        put_halves(to + 32 * half, n.top);
        if (nm_mins(format)) put_halves(to + 64 + 32 * half, n.top_low);
        to += nm_head_bytes(format);
    }
    for (int s = 0; s < steps; s++, to += nm_record_bytes(format)) {
        V16 codes[NM_STEP];
        uint8_t *at = to + nm_code_bytes(format);
        for (int p = 0; p < parts; p++) {
            const int i = s * parts + p;
            const V16 scale = nm_nested(format) ? v_mul(n.scale[i], n.top) : b[i].scale;
            const V16 low = format == NM_Q4K ? v_mul(n.low[s], n.top_low) : b[i].low;
            codes_of(x + size * i, size, scale, low, nm_mins(format), lowest, highest, codes + size * p);
            if (nm_nested(format)) put_bytes(at + 32 * p + 16 * half, n.scale[i]);
            else put_halves(at + 32 * half, scale);
            if (format == NM_Q4K) put_bytes(at + 32 + 16 * half, n.low[s]);
            if (format == NM_Q4A) put_halves(at + 64 + 32 * half, low);
        }
        put_codes(format, to, half, codes);
    }
}

typedef struct {
    const nm_part *parts;
    int64_t n, k, format;
    uint8_t *records;
    float *units;
    int64_t *bad; /* the first row with a NaN or infinity, n where there is none */
} fit_args;

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

/* The power of two that leaves the row's largest magnitude in [2^14, 2^15); 0: the row has a NaN or infinity. */
static float unit_of(const fit_args *a, int64_t row) {
    uint32_t most = 0, bits[CHUNK];
    for (int64_t k = 0; k < a->k; k += CHUNK) {
        const int64_t count = lesser(CHUNK, a->k - k);
        float part[CHUNK];
        nm_row_f32(a->parts, row, k, count, part);
        memcpy(bits, part, (size_t)count * 4);
        for (int64_t i = 0; i < count; i++) {
            const uint32_t size = bits[i] & 0x7fffffffu;
            most = size > most ? size : most;
        }
    }
    if (most >= 0x7f800000u) return 0.0f;
    const uint32_t exponent = most >> 23, unit = (exponent > 15 ? exponent - 14 : 1) << 23;
    float f;
    memcpy(&f, &unit, 4);
    return most ? f : 1.0f;
}

NOINLINE void fit_panel(const void *context, int64_t panel) {
    const fit_args *a = context;
    const int format = (int)a->format;
    const int64_t span = nm_nested(format) ? NM_STEP * NM_SUPER : NM_STEP, spans = (a->k + span - 1) / span;
    const int64_t bytes = nm_record_bytes(format) * (span / NM_STEP) + nm_head_bytes(format);
    V16 x[NM_STEP * NM_SUPER];
    float inverse[NM_PANEL], part[NM_STEP * NM_SUPER], *to = (float *)x;
    for (int64_t c = 0; c < NM_PANEL; c++) {
        const int64_t row = panel * NM_PANEL + c;
        const float unit = row < a->n ? unit_of(a, row) : 1.0f;
        if (unit == 0.0f) {
            int64_t seen = __atomic_load_n(a->bad, __ATOMIC_RELAXED);
            while (row < seen && !__atomic_compare_exchange_n(a->bad, &seen, row, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
            return;
        }
        a->units[row] = unit;
        inverse[c] = 1.0f / unit;
    }
    for (int64_t s = 0; s < spans; s++)
        for (int64_t half = 0; half < 2; half++) {
            const int64_t count = lesser(span, a->k - s * span);
            for (int64_t lane = 0; lane < LANES; lane++) {
                const int64_t c = half * LANES + lane, row = panel * NM_PANEL + c, real = row < a->n ? count : 0;
                if (real) nm_row_f32(a->parts, row, s * span, real, part);
                for (int64_t i = 0; i < real; i++) to[i * LANES + lane] = part[i] * inverse[c];
                for (int64_t i = real; i < span; i++) to[i * LANES + lane] = 0.0f;
            }
            uint8_t *record = a->records + (panel * spans + s) * bytes;
            switch (format) {
            case NM_Q8: fit_span(NM_Q8, x, half, record); break;
            case NM_Q4: fit_span(NM_Q4, x, half, record); break;
            case NM_Q4A: fit_span(NM_Q4A, x, half, record); break;
            case NM_Q4K: fit_span(NM_Q4K, x, half, record); break;
            default: fit_span(NM_Q6K, x, half, record);
            }
        }
}

#define CAT2(a, b) a##b
#define CAT(a, b) CAT2(a, b)

int64_t CAT(nm_quant_fit_, NM_SUFFIX)(const nm_part *parts, int64_t count, int64_t k, int64_t format, uint8_t *records,
                                      float *units) {
    int64_t n = 0;
    for (int64_t i = 0; i < count; i++) n += parts[i].rows;
    int64_t bad = n;
    const fit_args a = {parts, n, k, format, records, units, &bad};
    nm_for((n + NM_PANEL - 1) / NM_PANEL, nm_threads(), fit_panel, &a);
    return bad < n ? bad + 1 : 0;
}
