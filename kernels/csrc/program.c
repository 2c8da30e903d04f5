/* Several kernels of a forward pass in one call: the same functions with the same arguments, so the same bits. */
#include "module.h"

enum { EMBED, ADD_ROWS, ADD, NORM, MATMUL, ROPE_WRITE, ATTEND, GATE, ACTIVATE };

/* One kernel call. Parts are columns of activation buffers, by their index; -1: none. */
typedef struct {
    int64_t kind;
    const void *object; /* matrix, weight of a norm, table of rows or cosines */
    const void *other;  /* bias of a norm, sines */
    int64_t x, out, residual;
    int64_t quantised; /* the matrix is an nm_quantised */
    int64_t width;     /* of the matrix's rows, of the vectors of a norm, of the parts of a sum; inner width of a gate */
    int64_t groups;    /* vectors of a norm in a row */
    int64_t choice;    /* norm: centred; gate: activation; attention: bidirectional */
    int64_t limit;     /* rows of the table */
    int64_t layer, heads, kv_heads, head_dim, half, window, right;
    float eps, offset, scale, softcap;
} nm_op;

typedef struct {
    float *const *parts; /* first element of each part */
    const int64_t *strides;
    int64_t rows;
    const int64_t *tokens, *positions, *slots; /* [rows] */
    const int32_t *lane, *tables, *lengths;
    int64_t lanes, table_width;
    char *k, *v; /* pages of layer 0 */
    int64_t layer_bytes, pages, bf16;
} nm_call;

static int64_t embed(const nm_op *op, const nm_call *c) {
    float *out = c->parts[op->out];
    const int64_t stride = c->strides[op->out], together = stride == op->width ? c->rows : 1;
    for (int64_t i = 0; i < c->rows; i += together)
        if (op->quantised ? nm_quantised_rows(op->object, c->tokens + i, out + i * stride, together)
                          : nm_rows(op->object, c->tokens + i, out + i * stride, together))
            return 1;
    if (op->scale == 1.0f) return 0;
    for (int64_t i = 0; i < c->rows; i++)
        for (int64_t j = 0; j < op->width; j++) out[i * stride + j] *= op->scale;
    return 0;
}

static int64_t add_rows(const nm_op *op, const nm_call *c) {
    for (int64_t i = 0; i < c->rows; i++)
        if (c->positions[i] >= op->limit) return 1;
    for (int64_t i = 0; i < c->rows; i++) {
        if (c->positions[i] < 0) continue; /* an idle row */
        float *x = c->parts[op->x] + i * c->strides[op->x];
        const float *row = (const float *)op->object + c->positions[i] * op->width;
        for (int64_t j = 0; j < op->width; j++) x[j] += row[j];
    }
    return 0;
}

static int64_t add(const nm_op *op, const nm_call *c) {
    for (int64_t i = 0; i < c->rows; i++) {
        const float *x = c->parts[op->x] + i * c->strides[op->x];
        const float *residual = c->parts[op->residual] + i * c->strides[op->residual];
        float *out = c->parts[op->out] + i * c->strides[op->out];
        for (int64_t j = 0; j < op->width; j++) out[j] = residual[j] + x[j];
    }
    return 0;
}

static int64_t attend(const nm_op *op, const nm_call *c) {
    const nm_attention a = {
        .q = c->parts[op->x], .q_stride = c->strides[op->x],
        .k_pages = c->k + op->layer * c->layer_bytes, .v_pages = c->v + op->layer * c->layer_bytes, .pages = c->pages,
        .tables = c->tables, .lanes = c->lanes, .table_width = c->table_width,
        .row_lane = c->lane, .positions = c->positions,
        .out = c->parts[op->out], .out_stride = c->strides[op->out], .rows = c->rows,
        .heads = op->heads, .kv_heads = op->kv_heads, .head_dim = op->head_dim,
        .window = op->window, .lengths = op->choice ? c->lengths : NULL, .right = op->right,
        .bf16 = c->bf16, .scale = op->scale, .softcap = op->softcap,
    };
    return nm_paged_attention(&a);
}

static int64_t run_op(const nm_op *op, const nm_call *c) {
    const float *x = op->x < 0 ? NULL : c->parts[op->x];
    const int64_t xs = op->x < 0 ? 0 : c->strides[op->x];
    const float *residual = op->residual < 0 ? NULL : c->parts[op->residual];
    const int64_t rs = op->residual < 0 ? 0 : c->strides[op->residual];
    float *out = op->out < 0 ? NULL : c->parts[op->out];
    const int64_t os = op->out < 0 ? 0 : c->strides[op->out];
    switch (op->kind) {
    case EMBED: return embed(op, c);
    case ADD_ROWS: return add_rows(op, c);
    case ADD: return add(op, c);
    case NORM: {
        const nm_norm n = {x,  xs, op->object, op->other,  residual,  rs,      out,
                           os, c->rows, op->groups, op->width, op->eps, op->offset};
        nm_normalise(&n, op->choice);
        return 0;
    }
    case MATMUL:
        return op->quantised ? nm_quantised_linear(op->object, x, xs, residual, rs, out, os, c->rows, 0, NULL, NULL)
                             : nm_linear(op->object, x, xs, residual, rs, out, os, c->rows, 0, NULL, NULL);
    case ROPE_WRITE:
        return nm_rope_write(c->parts[op->x], xs, op->object, op->other, op->limit, c->positions, c->slots,
                             c->k + op->layer * c->layer_bytes, c->v + op->layer * c->layer_bytes, c->pages, c->rows,
                             op->heads, op->kv_heads, op->head_dim, op->half, c->bf16);
    case ATTEND: return attend(op, c);
    case GATE: nm_gated(x, out, c->rows, op->width, op->choice); return 0;
    case ACTIVATE: nm_activate(x, out, c->rows, op->width, op->choice); return 0;
    default: return 1;
    }
}

/* Returns 0, or 1 + the index of the first operation that was refused; those before it are done. */
EXPORT int64_t nm_run(const nm_op *ops, int64_t count, const nm_call *call) {
    for (int64_t i = 0; i < count; i++)
        if (run_op(ops + i, call)) return i + 1;
    return 0;
}
