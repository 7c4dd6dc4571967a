/* Catches cublasGemmEx and cublasGemmStridedBatchedEx, the same of float32 alone (cublasSgemm), and the
 * workspaces that their handles are given. A choice is launched through the newer API, all else by the
 * call that the job made. */
#ifndef GEMMTUNE_HIP /* see vendor.h */
#include <pthread.h>
#include <stdlib.h>

#include "calls.h"

static _Atomic(void *) lt_matmul, lt_set_layout, lt_set_desc;
static _Atomic(void *) lt_make_layout, lt_make_desc, lt_drop_layout, lt_drop_desc;
static _Atomic(void *) blas_gemm, blas_batched, blas_single, blas_single_batched;
static _Atomic(void *) blas_set_workspace, blas_set_stream;
static _Atomic(void *) blas_get_stream, blas_get_pointer_mode, blas_destroy;

/* The workspace that the job gave a handle, until it is given a stream: then it is the library's. */
typedef struct {
    void *handle, *workspace;
    size_t bytes;
} Given;
enum { MOST_HANDLES = 256 };
static Given given[MOST_HANDLES];
static int handles; /* places of `given` that were ever used */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void kept_lock(void) { pthread_mutex_lock(&lock); }
void kept_unlock(void) { pthread_mutex_unlock(&lock); }
void kept_fork_child(void) { pthread_mutex_init(&lock, NULL); }

static void remember(void *handle, void *workspace, size_t bytes)
{
    Given *own = NULL, *empty = NULL;
    kept_lock();
    for (int i = 0; i < handles && !own; i++) {
        if (given[i].handle == handle) own = &given[i];
        else if (!given[i].handle) empty = &given[i];
    }
    if (!own && workspace) own = empty ? empty : handles < MOST_HANDLES ? &given[handles++] : NULL;
    if (own) *own = workspace ? (Given){handle, workspace, bytes} : (Given){NULL, NULL, 0};
    kept_unlock();
}

static Given workspace_of(void *handle)
{
    Given found = {handle, NULL, 0};
    kept_lock();
    for (int i = 0; i < handles; i++)
        if (given[i].handle == handle) found = given[i];
    kept_unlock();
    return found;
}

EXPORT int BLAS(SetWorkspace_v2)(void *handle, void *workspace, size_t bytes)
{
    BlasSetWorkspace *real = BLAS_FUNCTION(BlasSetWorkspace, blas_set_workspace, SetWorkspace_v2);
    if (!real) return STATUS_NOT_INITIALIZED;
    int status = real(handle, workspace, bytes);
    if (status == STATUS_SUCCESS) remember(handle, workspace, bytes);
    return status;
}

EXPORT int BLAS(SetStream_v2)(void *handle, void *stream)
{
    BlasSetStream *real = BLAS_FUNCTION(BlasSetStream, blas_set_stream, SetStream_v2);
    if (!real) return STATUS_NOT_INITIALIZED;
    int status = real(handle, stream);
    if (status == STATUS_SUCCESS) remember(handle, NULL, 0);
    return status;
}

EXPORT int BLAS(Destroy_v2)(void *handle)
{
    BlasDestroy *real = BLAS_FUNCTION(BlasDestroy, blas_destroy, Destroy_v2);
    if (!real) return STATUS_NOT_INITIALIZED;
    remember(handle, NULL, 0);
    return real(handle);
}

typedef struct {
    Call call;
    void *c;
    const void *alpha, *a, *b, *beta;
    Key key;
    int trans_a, trans_b, m, n, k, lda, ldb, ldc, a_type, b_type, c_type, batch, compute, algo;
    long long stride_a, stride_b, stride_c;
    Given given;
} BlasCall;

static int blas_plain(const BlasCall *x)
{
    int status = STATUS_NOT_INITIALIZED;
    inside++;
    if (x->key.api == API_GEMM) {
        BlasGemm *real = BLAS_FUNCTION(BlasGemm, blas_gemm, GemmEx);
        if (real)
            status = real(x->call.handle, x->trans_a, x->trans_b, x->m, x->n, x->k, x->alpha, x->a,
                          x->a_type, x->lda, x->b, x->b_type, x->ldb, x->beta, x->c, x->c_type,
                          x->ldc, x->compute, x->algo);
    } else if (x->key.api == API_SINGLE) {
        BlasSingle *real = BLAS_FUNCTION(BlasSingle, blas_single, Sgemm_v2);
        if (real)
            status = real(x->call.handle, x->trans_a, x->trans_b, x->m, x->n, x->k, x->alpha, x->a,
                          x->lda, x->b, x->ldb, x->beta, x->c, x->ldc);
    } else if (x->key.api == API_SINGLE_BATCHED) {
        BlasSingleBatched *real =
            BLAS_FUNCTION(BlasSingleBatched, blas_single_batched, SgemmStridedBatched);
        if (real)
            status = real(x->call.handle, x->trans_a, x->trans_b, x->m, x->n, x->k, x->alpha, x->a,
                          x->lda, x->stride_a, x->b, x->ldb, x->stride_b, x->beta, x->c, x->ldc,
                          x->stride_c, x->batch);
    } else {
        BlasBatched *real = BLAS_FUNCTION(BlasBatched, blas_batched, GemmStridedBatchedEx);
        if (real)
            status = real(x->call.handle, x->trans_a, x->trans_b, x->m, x->n, x->k, x->alpha, x->a,
                          x->a_type, x->lda, x->stride_a, x->b, x->b_type, x->ldb, x->stride_b,
                          x->beta, x->c, x->c_type, x->ldc, x->stride_c, x->batch, x->compute,
                          x->algo);
    }
    inside--;
    return status;
}

static void *plan_layout(const Key *key, int type, uint64_t rows, uint64_t columns, int64_t ld,
                         int64_t stride)
{
    LtLayoutCreate *create = LT_FUNCTION(LtLayoutCreate, lt_make_layout, MatrixLayoutCreate);
    LtSet *set = LT_FUNCTION(LtSet, lt_set_layout, MatrixLayoutSetAttribute);
    void *made = NULL;
    if (!create || !set || create(&made, type, rows, columns, ld)) return NULL;
    int32_t batch = key->batch;
    if (key->batch > 1 && (set(made, LAYOUT_BATCH, &batch, sizeof batch) ||
                                    set(made, LAYOUT_STRIDE, &stride, sizeof stride))) {
        LtDestroy *drop = LT_FUNCTION(LtDestroy, lt_drop_layout, MatrixLayoutDestroy);
        if (drop) drop(made);
        return NULL;
    }
    return made;
}

static void plan_drop(Plan *plan)
{
    LtDestroy *layout = LT_FUNCTION(LtDestroy, lt_drop_layout, MatrixLayoutDestroy);
    LtDestroy *desc = LT_FUNCTION(LtDestroy, lt_drop_desc, MatmulDescDestroy);
    void *layouts[3] = {plan->a, plan->b, plan->d};
    for (int i = 0; i < 3; i++)
        if (layout && layouts[i]) layout(layouts[i]);
    if (desc && plan->desc) desc(plan->desc);
    free(plan);
}

/* The key in the newer API's terms, made at its first call. */
static Plan *plan_of(Cell *cell)
{
    Plan *plan = atomic_load_explicit(&cell->plan, memory_order_acquire);
    if (plan || !(plan = calloc(1, sizeof *plan))) return plan;
    const Key *g = &cell->key;
    LtDescCreate *create = LT_FUNCTION(LtDescCreate, lt_make_desc, MatmulDescCreate);
    LtSet *set = LT_FUNCTION(LtSet, lt_set_desc, MatmulDescSetAttribute);
    int an = g->trans_a == OP_N, bn = g->trans_b == OP_N;
    plan->a = plan_layout(g, g->type_a, an ? g->m : g->k, an ? g->k : g->m, g->lda, g->stride_a);
    plan->b = plan_layout(g, g->type_b, bn ? g->k : g->n, bn ? g->n : g->k, g->ldb, g->stride_b);
    plan->c = plan->d = plan_layout(g, g->type_d, g->m, g->n, g->ldd, g->stride_d);
    Plan *other = NULL;
    if (!plan->a || !plan->b || !plan->d || !create || !set ||
        create(&plan->desc, g->comp, g->scale) ||
        set(plan->desc, DESC_TRANS_A, &g->trans_a, sizeof g->trans_a) ||
        set(plan->desc, DESC_TRANS_B, &g->trans_b, sizeof g->trans_b)) {
        plan_drop(plan);
        return NULL;
    }
    if (atomic_compare_exchange_strong(&cell->plan, &other, plan)) return plan;
    plan_drop(plan); /* another thread was first */
    return other;
}

static const Plan *blas_plan(const Call *call, Cell *cell)
{
    (void)call;
    return plan_of(cell);
}

static int blas_go(const Call *call, Cell *cell, const uint64_t *algo)
{
    const BlasCall *x = (const BlasCall *)call;
    LtMatmul *matmul = algo ? LT_FUNCTION(LtMatmul, lt_matmul, Matmul) : NULL;
    if (!algo) return blas_plain(x);
    Plan *plan = matmul ? plan_of(cell) : NULL;
    if (!plan) return STATUS_NOT_INITIALIZED;
    inside++;
    /* A handle of the older API is one of the newer API's too, as both document. */
    int status = matmul(x->call.handle, plan->desc, x->alpha, x->a, plan->a, x->b, plan->b, x->beta, x->c,
                        plan->d, x->c, plan->d, algo, x->given.workspace, x->given.bytes,
                        call->stream);
    inside--;
    return status;
}

static Reason blas_key(BlasCall *x)
{
    BlasGetStream *stream = BLAS_FUNCTION(BlasGetStream, blas_get_stream, GetStream_v2);
    BlasGetPointerMode *mode =
        BLAS_FUNCTION(BlasGetPointerMode, blas_get_pointer_mode, GetPointerMode_v2);
    int pointers = POINTERS_ON_HOST, api = x->key.api;
    if (!stream || !mode || stream(x->call.handle, &x->call.stream) || mode(x->call.handle, &pointers))
        return NOT_READ;
    if (pointers != POINTERS_ON_HOST || x->m < 0 || x->n < 0 || x->k < 0) return NOT_SPELLED;
    if (x->compute != COMPUTE_32F && x->compute != COMPUTE_64F) return NOT_SPELLED;
    x->given = workspace_of(x->call.handle);
    int scale = x->compute == COMPUTE_64F ? TYPE_64F : TYPE_32F, beta = nonzero(x->beta, scale);
    if (beta < 0) return NOT_SPELLED;
    x->key = (Key){
        .m = (uint64_t)x->m, .n = (uint64_t)x->n, .k = (uint64_t)x->k,
        .lda = x->lda, .ldb = x->ldb, .ldd = x->ldc,
        .stride_a = x->batch > 1 ? x->stride_a : 0,
        .stride_b = x->batch > 1 ? x->stride_b : 0,
        .stride_d = x->batch > 1 ? x->stride_c : 0,
        .ws_bytes = x->given.bytes,
        .trans_a = x->trans_a, .trans_b = x->trans_b,
        .type_a = x->a_type, .type_b = x->b_type, .type_d = x->c_type, .bias_type = -1,
        .epi = EPILOGUE_NONE, .comp = x->compute, .scale = scale, .beta = beta, .batch = x->batch,
        .align = alignment(x->a, x->b, x->c, x->c), .api = api,
    };
    return FINE;
}

static int blas_dispatch(BlasCall *x)
{
    if (!watched()) return blas_plain(x);
    Reason reason = blas_key(x);
    if (reason == FINE) return dispatch(&x->key, &x->call);
    fault(reason);
    return blas_plain(x);
}

EXPORT int BLAS(GemmEx)(void *handle, int trans_a, int trans_b, int m, int n, int k,
                        const void *alpha, const void *a, int a_type, int lda, const void *b,
                        int b_type, int ldb, const void *beta, void *c, int c_type, int ldc,
                        int compute, int algo)
{
    BlasCall x = {
        .call = {.go = blas_go, .plan = blas_plan, .handle = handle}, .key = {.api = API_GEMM},
        .trans_a = trans_a, .trans_b = trans_b, .m = m, .n = n, .k = k,
        .alpha = alpha, .a = a, .a_type = a_type, .lda = lda, .b = b, .b_type = b_type, .ldb = ldb,
        .beta = beta, .c = c, .c_type = c_type, .ldc = ldc,
        .batch = 1, .compute = compute, .algo = algo,
    };
    return blas_dispatch(&x);
}

EXPORT int BLAS(GemmStridedBatchedEx)(void *handle, int trans_a, int trans_b, int m, int n, int k,
                                      const void *alpha, const void *a, int a_type, int lda,
                                      long long stride_a, const void *b, int b_type, int ldb,
                                      long long stride_b, const void *beta, void *c, int c_type,
                                      int ldc, long long stride_c, int batch, int compute, int algo)
{
    BlasCall x = {
        .call = {.go = blas_go, .plan = blas_plan, .handle = handle}, .key = {.api = API_BATCHED},
        .trans_a = trans_a, .trans_b = trans_b, .m = m, .n = n, .k = k,
        .alpha = alpha, .a = a, .a_type = a_type, .lda = lda, .stride_a = stride_a,
        .b = b, .b_type = b_type, .ldb = ldb, .stride_b = stride_b,
        .beta = beta, .c = c, .c_type = c_type, .ldc = ldc, .stride_c = stride_c,
        .batch = batch, .compute = compute, .algo = algo,
    };
    return blas_dispatch(&x);
}

/* Of float32 alone: whether it may be rounded to tf32 inside is the handle's to say. So these are
 * counted, and no choice is made for them. */
EXPORT int BLAS(Sgemm_v2)(void *handle, int trans_a, int trans_b, int m, int n, int k,
                          const float *alpha, const float *a, int lda, const float *b, int ldb,
                          const float *beta, float *c, int ldc)
{
    BlasCall x = {
        .call = {.go = blas_go, .plan = blas_plan, .handle = handle}, .key = {.api = API_SINGLE},
        .trans_a = trans_a, .trans_b = trans_b, .m = m, .n = n, .k = k,
        .alpha = alpha, .a = a, .a_type = TYPE_32F, .lda = lda, .b = b, .b_type = TYPE_32F,
        .ldb = ldb, .beta = beta, .c = c, .c_type = TYPE_32F, .ldc = ldc,
        .batch = 1, .compute = COMPUTE_32F,
    };
    return blas_dispatch(&x);
}

EXPORT int BLAS(SgemmStridedBatched)(void *handle, int trans_a, int trans_b, int m, int n, int k,
                                     const float *alpha, const float *a, int lda,
                                     long long stride_a, const float *b, int ldb,
                                     long long stride_b, const float *beta, float *c, int ldc,
                                     long long stride_c, int batch)
{
    BlasCall x = {
        .call = {.go = blas_go, .plan = blas_plan, .handle = handle},
        .key = {.api = API_SINGLE_BATCHED},
        .trans_a = trans_a, .trans_b = trans_b, .m = m, .n = n, .k = k,
        .alpha = alpha, .a = a, .a_type = TYPE_32F, .lda = lda, .stride_a = stride_a,
        .b = b, .b_type = TYPE_32F, .ldb = ldb, .stride_b = stride_b,
        .beta = beta, .c = c, .c_type = TYPE_32F, .ldc = ldc, .stride_c = stride_c,
        .batch = batch, .compute = COMPUTE_32F,
    };
    return blas_dispatch(&x);
}
#endif
