/* Catches cublasLtMatmul: its key, and the call as the job made it or with another algorithm. */
#include "calls.h"

static _Atomic(void *) lt_matmul;
#ifdef GEMMTUNE_HIP
#define GET_LAYOUT kept_layout
#define GET_DESC kept_desc
#else
static _Atomic(void *) lt_get_layout, lt_get_desc;
#define GET_LAYOUT LT_FUNCTION(LtGet, lt_get_layout, MatrixLayoutGetAttribute)
#define GET_DESC LT_FUNCTION(LtGet, lt_get_desc, MatmulDescGetAttribute)
#endif

typedef struct {
    Call call;
    LtMatmul *real;
    Plan plan;
    void *d, *workspace;
    const void *alpha, *a, *b, *beta, *c;
    size_t ws_bytes;
} LtCall;

static int lt_go(const Call *call, Cell *cell, const uint64_t *algo)
{
    const LtCall *x = (const LtCall *)call;
    (void)cell;
    inside++;
    int status = x->real(call->handle, x->plan.desc, x->alpha, x->a, x->plan.a, x->b, x->plan.b, x->beta,
                         x->c, x->plan.c, x->d, x->plan.d, algo ? algo : call->algo, x->workspace,
                         x->ws_bytes, call->stream);
    inside--;
    return status;
}

static const Plan *lt_plan(const Call *call, Cell *cell)
{
    (void)cell;
    return &((const LtCall *)call)->plan;
}

static int eight_bits(int type)
{
    return type != TYPE_32F && type != TYPE_64F && type != TYPE_16F && type != TYPE_16BF;
}

/* Fills in the key of a call; FINE, or why not. */
static Reason lt_key(Key *key, const LtCall *x)
{
    LtGet *layout = GET_LAYOUT, *desc = GET_DESC;
    const Plan *p = &x->plan;
    if (!layout || !desc || !p->desc || !p->a || !p->b || !p->c || !p->d)
        return NOT_READ;
    size_t written;
    int bad = 0;
#define READ(get, of, attribute, to) (bad |= get(of, attribute, &(to), sizeof(to), &written))
    Key c = {0}; /* of C what is as in D: type_d, ldd, stride_d */
    int32_t orders[4], batches[4], pointers = 0, sm_count = 0, bias_type = TYPE_UNSET;
    int8_t fast = 0;
    uint64_t stored[2];
    void *const layouts[4] = {p->a, p->b, p->c, p->d};
    int32_t *const types[4] = {&key->type_a, &key->type_b, &c.type_d, &key->type_d};
    int64_t *const lds[4] = {&key->lda, &key->ldb, &c.ldd, &key->ldd};
    int64_t *const strides[4] = {&key->stride_a, &key->stride_b, &c.stride_d, &key->stride_d};
    for (int i = 0; i < 4; i++) {
        READ(layout, layouts[i], LAYOUT_TYPE, *types[i]);
        READ(layout, layouts[i], LAYOUT_ORDER, orders[i]);
        READ(layout, layouts[i], LAYOUT_LD, *lds[i]);
        READ(layout, layouts[i], LAYOUT_BATCH, batches[i]);
        if (bad) return NOT_READ;
        if (orders[i] != ORDER_COLUMN || batches[i] != batches[0]) return NOT_SPELLED;
        if (batches[i] > 1) {
            int32_t mode = BATCH_STRIDED;
            READ(layout, layouts[i], LAYOUT_STRIDE, *strides[i]);
            /* Libraries older than the attribute have strided batches alone. */
            if (LAYOUT_BATCH_MODE >= 0 && !layout(layouts[i], LAYOUT_BATCH_MODE, &mode, sizeof mode, &written) &&
                mode != BATCH_STRIDED)
                return NOT_SPELLED;
        }
    }
    READ(layout, p->d, LAYOUT_ROWS, key->m);
    READ(layout, p->d, LAYOUT_COLUMNS, key->n);
    READ(layout, p->a, LAYOUT_ROWS, stored[0]);
    READ(layout, p->a, LAYOUT_COLUMNS, stored[1]);
    READ(desc, p->desc, DESC_COMPUTE, key->comp);
    READ(desc, p->desc, DESC_SCALE_TYPE, key->scale);
    READ(desc, p->desc, DESC_POINTER_MODE, pointers);
    READ(desc, p->desc, DESC_TRANS_A, key->trans_a);
    READ(desc, p->desc, DESC_TRANS_B, key->trans_b);
    READ(desc, p->desc, DESC_EPILOGUE, key->epi);
    if (desc(p->desc, DESC_SM_COUNT, &sm_count, sizeof sm_count, &written)) sm_count = 0;
    if (bad) return NOT_READ;
    if (pointers != POINTERS_ON_HOST || sm_count) return NOT_SPELLED;
    key->k = stored[key->trans_a == OP_N];
    key->batch = batches[0];
    key->bias_type = -1;
    if (key->epi != EPILOGUE_NONE && key->epi & EPILOGUE_HAS_BIAS) {
        READ(desc, p->desc, DESC_BIAS_TYPE, bias_type);
        /* Unset it is D's type, for an FP8 result C's. */
        int32_t unset = eight_bits(key->type_d) ? c.type_d : key->type_d;
        key->bias_type = bias_type == TYPE_UNSET ? unset : bias_type;
    }
    if (eight_bits(key->type_a) || eight_bits(key->type_b)) {
        int32_t a_mode = 0, b_mode = 0;
        if (DESC_FAST_ACCUM >= 0) READ(desc, p->desc, DESC_FAST_ACCUM, fast);
        /* Libraries older than the attribute have one scale per tensor. */
        if (desc(p->desc, DESC_A_SCALE_MODE, &a_mode, sizeof a_mode, &written)) a_mode = 0;
        if (desc(p->desc, DESC_B_SCALE_MODE, &b_mode, sizeof b_mode, &written)) b_mode = 0;
        key->fast_accum = fast;
        key->scale_mode = a_mode == b_mode ? a_mode : a_mode | b_mode << 8;
    }
    if (bad) return NOT_READ;
    if ((key->beta = nonzero(x->beta, key->scale)) < 0) return NOT_SPELLED;
    if (c.type_d != key->type_d && !eight_bits(key->type_d)) return NOT_SPELLED;
    if (key->beta && (c.ldd != key->ldd || c.stride_d != key->stride_d)) return NOT_SPELLED;
    key->ws_bytes = x->workspace ? x->ws_bytes : 0;
    key->align = alignment(x->a, x->b, key->beta ? x->c : x->d, x->d);
    key->api = API_LT;
    return FINE;
#undef READ
}

EXPORT int LT(Matmul)(void *handle, void *desc, const void *alpha, const void *a, void *a_layout,
                      const void *b, void *b_layout, const void *beta, const void *c,
                      void *c_layout, void *d, void *d_layout, const void *algo, void *workspace,
                      size_t ws_bytes, void *stream)
{
    LtMatmul *real = LT_FUNCTION(LtMatmul, lt_matmul, Matmul);
    if (!real) return STATUS_NOT_INITIALIZED;
    if (!watched())
        return real(handle, desc, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout,
                    algo, workspace, ws_bytes, stream);
    LtCall x = {
        .call = {.go = lt_go, .plan = lt_plan, .algo = algo, .handle = handle, .stream = stream},
        .real = real, .plan = {desc, a_layout, b_layout, c_layout, d_layout},
        .alpha = alpha, .a = a, .b = b, .beta = beta, .c = c, .d = d,
        .workspace = workspace, .ws_bytes = ws_bytes,
    };
    Key key = {0};
    Reason reason = lt_key(&key, &x);
    if (reason == FINE) return dispatch(&key, &x.call);
    fault(reason);
    return lt_go(&x.call, NULL, NULL);
}
