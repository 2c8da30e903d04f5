/* Rows of a quantised matrix as float32: gathers, the same for every instruction set. */
#include "quant.h"

/* Code of element i (of 32) of column c (of 32) of a record. */
static int code_of(int format, const uint8_t *record, int64_t c, int64_t i) {
    const int64_t half = c / 16, lane = c % 16 * 4 + i % 4, group = i / 4;
    if (format == NM_Q8) return record[half * 512 + group * 64 + lane];
    if (format != NM_Q6K) return record[half * 256 + group % 4 * 64 + lane] >> group / 4 * 4 & 15;
    const int64_t part = group / 4, of = group % 4; /* nibbles of groups 0, 1 are low, of 2, 3 high */
    const int low = record[half * 256 + (2 * part + of % 2) * 64 + lane] >> of / 2 * 4 & 15;
    const int high = record[512 + half * 128 + part * 64 + lane] >> 2 * of & 3;
    return low | high << 4;
}

static void row(const nm_quantised *w, int64_t id, float *out) {
    const int format = (int)w->format;
    const int64_t column = id % NM_PANEL, steps = nm_steps(w), codes = nm_code_bytes(format);
    const uint8_t *record = w->records + id / NM_PANEL * nm_panel_bytes(w);
    const float unit = w->units[id];
    float top = 0.0f, top_min = 0.0f;
    for (int64_t s = 0; s < steps && s * NM_STEP < w->k; s++) {
        if (nm_nested(format) && s % NM_SUPER == 0) {
            top = nm_half(record + 2 * column);
            if (nm_mins(format)) top_min = nm_half(record + 64 + 2 * column);
            record += nm_head_bytes(format);
        }
        const uint8_t *mins = record + codes + nm_scale_bytes(format);
        float scale[2], min = 0.0f;
        for (int part = 0; part < nm_parts(format); part++) {
            const uint8_t *at = record + codes + 32 * part + column;
            if (format == NM_Q4K) scale[part] = (float)*at * top;
            else if (format == NM_Q6K) scale[part] = (float)(int8_t)*at * top;
            else scale[part] = nm_half(record + codes + 2 * column);
        }
        if (format == NM_Q4A) min = nm_half(mins + 2 * column);
        if (format == NM_Q4K) min = (float)(int8_t)mins[column] * top_min;
        const int64_t left = w->k - s * NM_STEP, end = left < NM_STEP ? left : NM_STEP;
        for (int64_t i = 0; i < end; i++) {
            const float d = scale[nm_parts(format) == 2 ? i / 16 : 0];
            float value = d * (float)(code_of(format, record, column, i) - nm_zero(format));
            if (nm_mins(format)) value += min;
            out[s * NM_STEP + i] = value * unit;
        }
        record += nm_record_bytes(format);
    }
}

typedef struct {
    const nm_quantised *w;
    const int64_t *ids;
    float *out;
} rows_args;

static void one_row(const void *context, int64_t item) {
    const rows_args *a = context;
    row(a->w, a->ids[item], a->out + item * a->w->k);
}

int64_t nm_quant_rows(const nm_quantised *w, const int64_t *ids, float *out, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= w->n) return i + 1;
    const rows_args args = {w, ids, out};
    nm_for(count, count < 8 ? 1 : nm_threads(), one_row, &args);
    return 0;
}
