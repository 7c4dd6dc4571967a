/* A stand-in for libcublas, the part that gemmtune catches, over fake_cublaslt.c. Written from
 * cublas_api.h: a handle is one of cublasLt's too, a new stream takes the given workspace away. */
#include <stdint.h>
#include <stdlib.h>

enum { OK = 0, NOT_INITIALIZED = 1, INVALID = 7, MAGIC = 0x17ce11, COMPUTE_32F = 68, R_32F = 0 };

typedef struct { int magic; void *stream, *workspace; size_t bytes; int pointers; } Handle;

int cublasLtMatrixLayoutCreate(void **, int, uint64_t, uint64_t, int64_t);
int cublasLtMatrixLayoutSetAttribute(void *, int, const void *, size_t);
int cublasLtMatrixLayoutDestroy(void *);
int cublasLtMatmulDescCreate(void **, int, int);
int cublasLtMatmulDescSetAttribute(void *, int, const void *, size_t);
int cublasLtMatmulDescDestroy(void *);
int cublasLtTSTMatmul(void *, void *, const void *, const void *, void *, const void *, void *,
                      const void *, const void *, void *, void *, void *, const void *, void *, size_t,
                      void *);

int fake_unlucky(void);

int cublasCreate_v2(Handle **made)
{
    *made = calloc(1, sizeof **made);
    (*made)->magic = MAGIC;
    return OK;
}

static int bad(const Handle *h) { return !h || h->magic != MAGIC; }

int cublasDestroy_v2(Handle *h)
{
    if (bad(h)) return NOT_INITIALIZED;
    free(h);
    return OK;
}

int cublasSetStream_v2(Handle *h, void *stream)
{
    if (bad(h)) return NOT_INITIALIZED;
    h->stream = stream;
    h->workspace = NULL;
    h->bytes = 0;
    return OK;
}

int cublasSetWorkspace_v2(Handle *h, void *workspace, size_t bytes)
{
    if (bad(h)) return NOT_INITIALIZED;
    if ((uintptr_t)workspace % 256) return INVALID;
    h->workspace = workspace;
    h->bytes = bytes;
    return OK;
}

int cublasGetStream_v2(Handle *h, void **stream)
{
    if (bad(h) || fake_unlucky()) return NOT_INITIALIZED;
    *stream = h->stream;
    return OK;
}

int cublasGetPointerMode_v2(Handle *h, int *mode)
{
    if (bad(h) || fake_unlucky()) return NOT_INITIALIZED;
    *mode = h->pointers;
    return OK;
}

static void *layout(int type, int rows, int columns, int ld, long long stride, int batch)
{
    void *made;
    int64_t step = stride;
    int32_t count = batch;
    if (cublasLtMatrixLayoutCreate(&made, type, (uint64_t)rows, (uint64_t)columns, ld)) return NULL;
    cublasLtMatrixLayoutSetAttribute(made, 5, &count, sizeof count);
    cublasLtMatrixLayoutSetAttribute(made, 6, &step, sizeof step);
    return made;
}

int cublasGemmStridedBatchedEx(Handle *h, int ta, int tb, int m, int n, int k, const void *alpha,
                               const void *a, int at, int lda, long long sa, const void *b, int bt,
                               int ldb, long long sb, const void *beta, void *c, int ct, int ldc,
                               long long sc, int batch, int compute, int algo)
{
    void *desc;
    (void)algo;
    if (bad(h)) return NOT_INITIALIZED;
    if (compute != COMPUTE_32F || cublasLtMatmulDescCreate(&desc, compute, R_32F)) return INVALID;
    void *la = layout(at, ta ? k : m, ta ? m : k, lda, sa, batch);
    void *lb = layout(bt, tb ? n : k, tb ? k : n, ldb, sb, batch);
    void *lc = layout(ct, m, n, ldc, sc, batch);
    cublasLtMatmulDescSetAttribute(desc, 3, &ta, sizeof ta);
    cublasLtMatmulDescSetAttribute(desc, 4, &tb, sizeof tb);
    int status = INVALID;
    if (la && lb && lc)
        status = cublasLtTSTMatmul(h, desc, alpha, a, la, b, lb, beta, c, lc, c, lc, NULL,
                                   h->workspace, h->bytes, h->stream);
    cublasLtMatmulDescDestroy(desc);
    cublasLtMatrixLayoutDestroy(la);
    cublasLtMatrixLayoutDestroy(lb);
    cublasLtMatrixLayoutDestroy(lc);
    return status;
}

int cublasGemmEx(Handle *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a,
                 int at, int lda, const void *b, int bt, int ldb, const void *beta, void *c, int ct,
                 int ldc, int compute, int algo)
{
    return cublasGemmStridedBatchedEx(h, ta, tb, m, n, k, alpha, a, at, lda, 0, b, bt, ldb, 0, beta,
                                      c, ct, ldc, 0, 1, compute, algo);
}

int cublasSgemm_v2(Handle *h, int ta, int tb, int m, int n, int k, const float *alpha, const float *a,
                   int lda, const float *b, int ldb, const float *beta, float *c, int ldc)
{
    return cublasGemmEx(h, ta, tb, m, n, k, alpha, a, R_32F, lda, b, R_32F, ldb, beta, c, R_32F, ldc,
                        COMPUTE_32F, -1);
}

int cublasSgemmStridedBatched(Handle *h, int ta, int tb, int m, int n, int k, const float *alpha,
                              const float *a, int lda, long long sa, const float *b, int ldb,
                              long long sb, const float *beta, float *c, int ldc, long long sc,
                              int batch)
{
    return cublasGemmStridedBatchedEx(h, ta, tb, m, n, k, alpha, a, R_32F, lda, sa, b, R_32F, ldb, sb,
                                      beta, c, R_32F, ldc, sc, batch, COMPUTE_32F, -1);
}
