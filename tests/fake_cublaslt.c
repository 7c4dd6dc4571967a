/* A stand-in for libcublasLt where there is no GPU: the part of its API that gemmtune calls, on CPU
 * memory. Written from cublasLt.h (CUDA 12.6): attribute numbers, sizes, statuses.
 *
 * It is strict where the library is, and refuses what it does not know: a size that differs from an
 * attribute's, an unknown attribute or algorithm, too small a workspace, a scale pointer that is
 * not 16-byte aligned, FP8 that is not T,N in multiples of 16. As on an H200 a heuristic has at most
 * 8 results. Which settings each algorithm takes is made up.
 */
#include <stddef.h>
#include <stdint.h>

#define LT(name) cublasLt##name
enum { OK = 0, NOT_INITIALIZED = 1, INVALID = 7, NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_16F = 2, R_16BF = 14, R_E4M3 = 28, R_E5M2 = 29, COMPUTE_32F = 68 };
enum { OP_N = 0, OP_T = 1, UNSET = -1 };
enum { MOST = 8 };

typedef struct {
    int32_t id, splitk;
    uint32_t tile, stages, reduction, swizzle, custom;
    uint16_t inner, cluster;
    int16_t types[6];
} Algo; /* within the 64 bytes of cublasLtMatmulAlgo_t */
typedef struct { uint64_t data[8]; } Opaque;
typedef struct { Opaque algo; size_t workspace; int state; float waves; int reserved[4]; } Result;

static int is8(int type) { return type == R_E4M3 || type == R_E5M2; }
static int is_e4m3(int type) { return type == R_E4M3; }
static int is_fnuz(int type) { (void)type; return 0; }

#include "fake_lt.h"

_Static_assert(sizeof(Algo) <= sizeof(Opaque), "an algorithm fits its structure");

static const struct { int id; uint32_t tiles[4], ntiles, align; int custom, splits, swizzle; }
KINDS[] = {
    {20, {15, 20, 0, 0}, 2, 2, 0, 1, 1},
    {66, {20, 23, 24, 32}, 4, 16, 7, 1, 0},
    {67, {20, 24, 0, 0}, 2, 16, 3, 0, 0},
};
enum { NKINDS = sizeof KINDS / sizeof *KINDS };

size_t cublasLtGetVersion(void) { return 130101; }

/* Copies a value into `to` if its size is the attribute's. */
static int take(void *to, size_t size, const void *buf, size_t given)
{
    if (!buf || size != given) return INVALID;
    memcpy(to, buf, size);
    return OK;
}

static int give(const void *from, size_t size, void *buf, size_t given, size_t *written)
{
    if (!given && !written) return INVALID;
    if (written) *written = size;
    if (!given) return OK;
    if (!buf || size != given) return INVALID;
    memcpy(buf, from, size);
    return OK;
}

int cublasLtMatrixLayoutSetAttribute(Layout *l, int attr, const void *buf, size_t size)
{
    switch (attr) {
    case 5: return take(&l->batch, 4, buf, size);
    case 6: return take(&l->stride, 8, buf, size);
    case 8: return take(&l->mode, 4, buf, size);
    }
    return INVALID;
}

int cublasLtMatrixLayoutGetAttribute(const Layout *l, int attr, void *buf, size_t size,
                                     size_t *written)
{
    static const int32_t column_major = 0;
    if (fake_unlucky()) return INVALID;
    switch (attr) {
    case 0: return give(&l->type, 4, buf, size, written);
    case 1: return give(&column_major, 4, buf, size, written);
    case 2: return give(&l->rows, 8, buf, size, written);
    case 3: return give(&l->cols, 8, buf, size, written);
    case 4: return give(&l->ld, 8, buf, size, written);
    case 5: return give(&l->batch, 4, buf, size, written);
    case 6: return give(&l->stride, 8, buf, size, written);
    case 8: return give(&l->mode, 4, buf, size, written);
    }
    return INVALID;
}

int cublasLtMatmulDescSetAttribute(Desc *d, int attr, const void *buf, size_t size)
{
    switch (attr) {
    case 2: return take(&d->pointers, 4, buf, size);
    case 3: return take(&d->op_a, 4, buf, size);
    case 4: return take(&d->op_b, 4, buf, size);
    case 7: return take(&d->epilogue, 4, buf, size);
    case 8: return take(&d->bias, 8, buf, size);
    case 11: return take(&d->aux, 8, buf, size);
    case 12: return take(&d->aux_ld, 8, buf, size);
    case 17: return take(&d->scale_a, 8, buf, size);
    case 18: return take(&d->scale_b, 8, buf, size);
    case 25: return take(&d->fast, 1, buf, size);
    case 26: return take(&d->bias_type, 4, buf, size);
    }
    return INVALID;
}

int cublasLtMatmulDescGetAttribute(const Desc *d, int attr, void *buf, size_t size, size_t *written)
{
    static const int32_t none = 0;
    if (attr == failing || fake_unlucky()) return INVALID;
    switch (attr) {
    case 0: return give(&d->compute, 4, buf, size, written);
    case 1: return give(&d->scale, 4, buf, size, written);
    case 2: return give(&d->pointers, 4, buf, size, written);
    case 3: return give(&d->op_a, 4, buf, size, written);
    case 4: return give(&d->op_b, 4, buf, size, written);
    case 7: return give(&d->epilogue, 4, buf, size, written);
    case 25: return give(&d->fast, 1, buf, size, written);
    case 26: return give(&d->bias_type, 4, buf, size, written);
    case 15: case 31: case 32: return give(&none, 4, buf, size, written);
    }
    return INVALID;
}

int cublasLtMatmulPreferenceCreate(Pref **out)
{
    *out = made(sizeof **out);
    **out = (Pref){0, {256, 256, 256, 256}};
    return OK;
}

int cublasLtMatmulPreferenceSetAttribute(Pref *p, int attr, const void *buf, size_t size)
{
    if (attr == 1) return take(&p->workspace, 8, buf, size);
    if (attr >= 5 && attr <= 8) return take(&p->align[attr - 5], 4, buf, size);
    return INVALID;
}

static int kind_of(int id)
{
    for (int i = 0; i < NKINDS; i++)
        if (KINDS[i].id == id) return i;
    return -1;
}

static int types_fit(const int t[6], int kind)
{
    if (t[0] != COMPUTE_32F || t[1] != R_32F || t[4] != t[5]) return 0;
    if (is8(t[2]) || is8(t[3]))
        return KINDS[kind].id != 20 && is8(t[2]) && is8(t[3]) && !is8(t[4]) &&
               !(t[2] == R_E5M2 && t[3] == R_E5M2);
    return t[2] == t[3] && (t[4] == t[2] || t[4] == R_32F) && (t[2] != R_32F || KINDS[kind].id == 20);
}

int cublasLtMatmulAlgoGetIds(void *h, int c, int s, int a, int b, int cc, int d, int count, int *ids,
                             int *found)
{
    const int t[6] = {c, s, a, b, cc, d};
    if (!is_handle(h)) return NOT_INITIALIZED;
    if (count <= 0) return INVALID;
    *found = 0;
    for (int i = 0; i < NKINDS && *found < count; i++)
        if (types_fit(t, i)) ids[(*found)++] = KINDS[i].id;
    return OK;
}

int cublasLtMatmulAlgoInit(void *h, int c, int s, int a, int b, int cc, int d, int id, Opaque *out)
{
    const int t[6] = {c, s, a, b, cc, d};
    int kind = kind_of(id);
    if (!is_handle(h)) return NOT_INITIALIZED;
    if (!out || kind < 0) return INVALID;
    if (!types_fit(t, kind)) return NOT_SUPPORTED;
    Algo algo = {.id = id, .splitk = 1};
    for (int i = 0; i < 6; i++) algo.types[i] = (int16_t)t[i];
    memset(out, 0, sizeof *out);
    memcpy(out, &algo, sizeof algo);
    return OK;
}

static void *setting(Algo *a, int attr, size_t *size)
{
    *size = attr >= 7 ? 2 : 4;
    switch (attr) {
    case 0: return &a->id;
    case 1: return &a->tile;
    case 2: return &a->splitk;
    case 3: return &a->reduction;
    case 4: return &a->swizzle;
    case 5: return &a->custom;
    case 6: return &a->stages;
    case 7: return &a->inner;
    case 8: return &a->cluster;
    }
    return NULL;
}

int cublasLtMatmulAlgoConfigSetAttribute(Opaque *o, int attr, const void *buf, size_t size)
{
    size_t own;
    void *to = attr ? setting((Algo *)o, attr, &own) : NULL; /* the id is read only */
    return to ? take(to, own, buf, size) : INVALID;
}

int cublasLtMatmulAlgoConfigGetAttribute(const Opaque *o, int attr, void *buf, size_t size,
                                         size_t *written)
{
    size_t own;
    void *from = setting((Algo *)(uintptr_t)o, attr, &own);
    return from ? give(from, own, buf, size, written) : INVALID;
}

int cublasLtMatmulAlgoCapGetAttribute(const Opaque *o, int attr, void *buf, size_t size,
                                      size_t *written)
{
    int kind = kind_of(((const Algo *)o)->id);
    if (kind < 0) return INVALID;
    static const uint32_t stages = 36;
    int32_t value = 0;
    switch (attr) {
    case 0: value = KINDS[kind].splits; break;
    case 1: value = 7; break;
    case 2: value = KINDS[kind].swizzle; break;
    case 3: value = 1; break;
    case 6: return give(KINDS[kind].tiles, 4 * KINDS[kind].ntiles, buf, size, written);
    case 7: value = KINDS[kind].custom; break;
    case 13: return give(&stages, KINDS[kind].id == 66 ? 4 : 0, buf, size, written);
    case 16: case 17: case 18: case 19: value = (int32_t)KINDS[kind].align; break;
    default: return INVALID;
    }
    return give(&value, 4, buf, size, written);
}

static int shapes_fit(const Desc *d, const Layout *a, const Layout *b, const Layout *c,
                      const Layout *dd, uint64_t *k)
{
    uint64_t am = d->op_a ? a->cols : a->rows, ak = d->op_a ? a->rows : a->cols;
    uint64_t bn = d->op_b ? b->rows : b->cols, bk = d->op_b ? b->cols : b->rows;
    const Layout *all[4] = {a, b, c, dd};
    if (am != dd->rows || bn != dd->cols || ak != bk || c->rows != am || c->cols != bn) return INVALID;
    for (int i = 0; i < 4; i++)
        if (all[i]->ld < (int64_t)all[i]->rows || all[i]->batch != dd->batch) return INVALID;
    if (a->mode || b->mode || c->mode || dd->mode) return NOT_SUPPORTED; /* not made here */
    switch (d->epilogue) {
    case GELU_AUX: case GELU_AUX_BIAS: case DGELU: case DGELU_BGRAD:
        if (d->aux_ld % 8 || d->aux_ld < (int64_t)dd->rows || dd->batch != 1) return INVALID;
        break;
    case PLAIN: case BIAS: case BGRADB: break;
    default: return NOT_SUPPORTED;
    }
    if (is8(a->type) && (!d->op_a || d->op_b || am % 16 || bn % 16 || ak % 16)) return NOT_SUPPORTED;
    if (d->fast && !is8(a->type)) return NOT_SUPPORTED;
    *k = ak;
    return OK;
}

static int check(void *h, const Desc *d, const Layout *a, const Layout *b, const Layout *c,
                 const Layout *dd, const Opaque *o, Result *r)
{
    Algo algo;
    uint64_t k;
    memcpy(&algo, o, sizeof algo);
    int kind = kind_of(algo.id), known = algo.tile == 0, status;
    if (!is_handle(h)) return NOT_INITIALIZED;
    if (kind < 0 || !r) return INVALID;
    if (algo.types[2] != a->type || algo.types[3] != b->type || algo.types[5] != dd->type) return INVALID;
    if ((status = shapes_fit(d, a, b, c, dd, &k))) return status;
    for (uint32_t i = 0; i < KINDS[kind].ntiles; i++) known |= KINDS[kind].tiles[i] == algo.tile;
    if (!known || (int)algo.custom > KINDS[kind].custom || algo.cluster == 1 || algo.cluster > 6 ||
        algo.splitk < 1 || (algo.splitk > 1) != (algo.reduction != 0) ||
        (algo.splitk > 1 && (!KINDS[kind].splits || (uint64_t)algo.splitk > k)))
        return NOT_SUPPORTED;
    const Layout *all[3] = {a, b, dd};
    for (int i = 0; i < 3; i++)
        if ((uint64_t)all[i]->ld * bytes(all[i]->type) % KINDS[kind].align) return NOT_SUPPORTED;
    memset(r, 0, sizeof *r);
    if (algo.reduction & 6) r->workspace = 4 * dd->rows * dd->cols * (size_t)(algo.splitk * dd->batch);
    r->waves = (float)(dd->rows * dd->cols) / (128 * 128) * (float)algo.splitk / 132;
    return OK;
}

int cublasLtMatmulAlgoCheck(void *h, const Desc *d, const Layout *a, const Layout *b,
                            const Layout *c, const Layout *dd, const Opaque *o, Result *r)
{
    return fake_unlucky() ? INVALID : check(h, d, a, b, c, dd, o, r);
}

int cublasLtMatmulAlgoGetHeuristic(void *h, const Desc *d, const Layout *a, const Layout *b,
                                   const Layout *c, const Layout *dd, const Pref *p, int count,
                                   Result *r, int *found)
{
    if (count <= 0 || !r || !found) return INVALID;
    *found = 0;
    for (int i = NKINDS; i-- > 0;)
        for (uint32_t tile = 0; tile < KINDS[i].ntiles && *found < (count < MOST ? count : MOST); tile++) {
            Result one;
            Opaque o;
            if (cublasLtMatmulAlgoInit(h, d->compute, d->scale, a->type, b->type, c->type, dd->type,
                                       KINDS[i].id, &o))
                continue;
            ((Algo *)&o)->tile = KINDS[i].tiles[tile];
            for (int x = 0; x < 4; x++)
                if (p->align[x] < KINDS[i].align) goto next;
            if (check(h, d, a, b, c, dd, &o, &one) || one.workspace > p->workspace)
                goto next;
            one.algo = o;
            r[(*found)++] = one;
        next:;
        }
    return *found ? OK : NOT_SUPPORTED;
}

static int matmul(void *h, const Desc *d, const float *alpha, const void *A, const Layout *a,
                  const void *B, const Layout *b, const float *beta, const void *C, const Layout *c,
                  void *D, const Layout *dd, const Opaque *o, void *workspace,
                  size_t workspace_bytes, void *stream)
{
    Result r;
    uint64_t k = 0;
    (void)stream;
    Result chosen;
    int found;
    if (!o) { /* then the library looks for one itself */
        const Pref pref = {workspace_bytes, {16, 16, 16, 16}};
        if (cublasLtMatmulAlgoGetHeuristic(h, d, a, b, c, dd, &pref, 1, &chosen, &found))
            return NOT_SUPPORTED;
        o = &chosen.algo;
    }
    if (((const Algo *)o)->tile == 20 && fake_unlucky()) return INVALID;
    int status = check(h, d, a, b, c, dd, o, &r);
    if (status) return status;
    if (!alpha || !beta || !A || !B || !C || !D) return INVALID;
    if (r.workspace > workspace_bytes || (r.workspace && !workspace)) return INVALID;
    if (((uintptr_t)d->scale_a | (uintptr_t)d->scale_b) % 16) return INVALID;
    if ((d->scale_a || d->scale_b) && !is8(a->type)) return INVALID;
    uint32_t epi = d->epilogue;
    if ((epi & (BIAS | 16) || epi == BGRADB) && !d->bias) return INVALID;
    if (epi & 128 && !d->aux) return INVALID;
    uint32_t align = KINDS[kind_of(((const Algo *)o)->id)].align;
    if (((uintptr_t)A | (uintptr_t)B | (uintptr_t)D) % align) return NOT_SUPPORTED;
    shapes_fit(d, a, b, c, dd, &k);
    multiply(d, alpha, A, a, B, b, beta, C, c, D, dd, k, o, ((const Algo *)o)->id);
    return OK;
}

#define MATMUL(name)                                                                                \
    int name(void *h, const Desc *d, const float *alpha, const void *A, const Layout *a,            \
             const void *B, const Layout *b, const float *beta, const void *C, const Layout *c,     \
             void *D, const Layout *dd, const Opaque *o, void *workspace, size_t workspace_bytes,   \
             void *stream)                                                                          \
    {                                                                                               \
        return matmul(h, d, alpha, A, a, B, b, beta, C, c, D, dd, o, workspace, workspace_bytes,    \
                      stream);                                                                      \
    }
MATMUL(cublasLtMatmul)
MATMUL(cublasLtTSTMatmul) /* the older API's own way in, which nothing can catch */
