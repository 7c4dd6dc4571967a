/* A stand-in for libcublasLt where there is no GPU: the part of its API that gemmtune calls, on CPU
 * memory. Written from cublasLt.h (CUDA 12.6): attribute numbers, sizes, statuses.
 *
 * It is strict where the library is, and refuses what it does not know: a size that differs from an
 * attribute's, an unknown attribute or algorithm, too small a workspace, a scale pointer that is
 * not 16-byte aligned, FP8 that is not T,N in multiples of 16. As on an H200 a heuristic has at most
 * 8 results. Which settings each algorithm takes is made up.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_INITIALIZED = 1, INVALID = 7, NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_16F = 2, R_16BF = 14, R_E4M3 = 28, R_E5M2 = 29, COMPUTE_32F = 68 };
enum { PLAIN = 1, BIAS = 4, GELU_AUX = 160, GELU_AUX_BIAS = 164, DGELU = 192, DGELU_BGRAD = 208,
       BGRADB = 512 };
enum { MAGIC = 0x17ce11, MOST = 8 };

typedef struct { int type; uint64_t rows, cols; int64_t ld, stride; int32_t batch; } Layout;
typedef struct {
    int compute, scale, pointers, op_a, op_b, bias_type;
    uint32_t epilogue;
    void *bias, *aux, *scale_a, *scale_b;
    int64_t aux_ld;
    int8_t fast;
} Desc;
typedef struct { uint64_t workspace; uint32_t align[4]; } Pref;
typedef struct {
    int32_t id, splitk;
    uint32_t tile, stages, reduction, swizzle, custom;
    uint16_t inner, cluster;
    int16_t types[6];
} Algo; /* within the 64 bytes of cublasLtMatmulAlgo_t */
typedef struct { uint64_t data[8]; } Opaque;
typedef struct { Opaque algo; size_t workspace; int state; float waves; int reserved[4]; } Result;

_Static_assert(sizeof(Algo) <= sizeof(Opaque), "an algorithm fits its structure");

static const struct { int id; uint32_t tiles[4], ntiles, align; int custom, splits, swizzle; }
KINDS[] = {
    {20, {15, 20, 0, 0}, 2, 2, 0, 1, 1},
    {66, {20, 23, 24, 32}, 4, 16, 7, 1, 0},
    {67, {20, 24, 0, 0}, 2, 16, 3, 0, 0},
};
enum { NKINDS = sizeof KINDS / sizeof *KINDS };

static _Atomic int live; /* descriptors not destroyed: what a test asks for */
int fake_live(void) { return live; }

static _Atomic uint64_t calls; /* launches that worked, by whatever name */
uint64_t fake_calls(void) { return calls; }

static _Atomic int failing = -1; /* an attribute of descriptions that cannot be read, for a test */
void fake_fail(int attribute) { failing = attribute; }

static _Thread_local Opaque last; /* the algorithm of this thread's last launch */
const void *fake_last(void) { return &last; }

size_t cublasLtGetVersion(void) { return 130101; }

int cublasLtCreate(void **handle)
{
    if (!handle) return INVALID;
    *handle = malloc(4);
    *(int *)*handle = MAGIC;
    return OK;
}

int cublasLtDestroy(void *handle) { free(handle); return OK; }

static void *made(size_t size) { live++; return calloc(1, size); }
static int destroyed(void *p) { if (!p) return INVALID; live--; free(p); return OK; }

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

static size_t bytes(int type)
{
    switch (type) {
    case R_32F: return 4;
    case R_16F: case R_16BF: return 2;
    case R_E4M3: case R_E5M2: return 1;
    }
    return 0;
}

int cublasLtMatrixLayoutCreate(Layout **out, int type, uint64_t rows, uint64_t cols, int64_t ld)
{
    if (!bytes(type)) return INVALID;
    *out = made(sizeof **out);
    **out = (Layout){type, rows, cols, ld, 0, 1};
    return OK;
}

int cublasLtMatrixLayoutSetAttribute(Layout *l, int attr, const void *buf, size_t size)
{
    switch (attr) {
    case 5: return take(&l->batch, 4, buf, size);
    case 6: return take(&l->stride, 8, buf, size);
    }
    return INVALID;
}

int cublasLtMatrixLayoutGetAttribute(const Layout *l, int attr, void *buf, size_t size,
                                     size_t *written)
{
    static const int32_t column_major = 0;
    switch (attr) {
    case 0: return give(&l->type, 4, buf, size, written);
    case 1: return give(&column_major, 4, buf, size, written);
    case 2: return give(&l->rows, 8, buf, size, written);
    case 3: return give(&l->cols, 8, buf, size, written);
    case 4: return give(&l->ld, 8, buf, size, written);
    case 5: return give(&l->batch, 4, buf, size, written);
    case 6: return give(&l->stride, 8, buf, size, written);
    }
    return INVALID;
}

int cublasLtMatrixLayoutDestroy(Layout *l) { return destroyed(l); }

int cublasLtMatmulDescCreate(Desc **out, int compute, int scale)
{
    if (compute != COMPUTE_32F || scale != R_32F) return INVALID;
    *out = made(sizeof **out);
    **out = (Desc){.compute = compute, .scale = scale, .bias_type = -1, .epilogue = 1};
    return OK;
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
    if (attr == failing) return INVALID;
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

int cublasLtMatmulDescDestroy(Desc *d) { return destroyed(d); }

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

int cublasLtMatmulPreferenceDestroy(Pref *p) { return destroyed(p); }

static int kind_of(int id)
{
    for (int i = 0; i < NKINDS; i++)
        if (KINDS[i].id == id) return i;
    return -1;
}

static int is8(int type) { return type == R_E4M3 || type == R_E5M2; }

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
    if (!h || *(int *)h != MAGIC) return NOT_INITIALIZED;
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
    if (!h || *(int *)h != MAGIC) return NOT_INITIALIZED;
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

int cublasLtMatmulAlgoCheck(void *h, const Desc *d, const Layout *a, const Layout *b,
                            const Layout *c, const Layout *dd, const Opaque *o, Result *r)
{
    Algo algo;
    uint64_t k;
    memcpy(&algo, o, sizeof algo);
    int kind = kind_of(algo.id), known = algo.tile == 0, status;
    if (!h || *(int *)h != MAGIC) return NOT_INITIALIZED;
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
            if (cublasLtMatmulAlgoCheck(h, d, a, b, c, dd, &o, &one) || one.workspace > p->workspace)
                goto next;
            one.algo = o;
            r[(*found)++] = one;
        next:;
        }
    return *found ? OK : NOT_SUPPORTED;
}

static float small_float(unsigned v, int exponent_bits, int bias)
{
    int mantissa_bits = 7 - exponent_bits, e = (v & 127) >> mantissa_bits;
    float m = (float)(v & ((1u << mantissa_bits) - 1)) / (float)(1 << mantissa_bits);
    float size = e ? ldexpf(1 + m, e - bias) : ldexpf(m, 1 - bias);
    return v & 128 ? -size : size;
}

static float load(const void *p, int type, int64_t at)
{
    uint32_t bits;
    float f;
    switch (type) {
    case R_32F: return ((const float *)p)[at];
    case R_16F: return (float)((const _Float16 *)p)[at];
    case R_E4M3: return small_float(((const uint8_t *)p)[at], 4, 7);
    case R_E5M2: return small_float(((const uint8_t *)p)[at], 5, 15);
    }
    bits = (uint32_t)((const uint16_t *)p)[at] << 16;
    memcpy(&f, &bits, 4);
    return f;
}

static void store(void *p, int type, int64_t at, float f)
{
    uint32_t bits;
    switch (type) {
    case R_32F: ((float *)p)[at] = f; return;
    case R_16F: ((_Float16 *)p)[at] = (_Float16)f; return;
    }
    memcpy(&bits, &f, 4);
    bits += 0x7fff + (bits >> 16 & 1); /* to nearest, ties to even */
    ((uint16_t *)p)[at] = (uint16_t)(bits >> 16);
}

static float gelu_inner(float x) { return 0.79788456f * (x + 0.044715f * x * x * x); }

/* Sums over the columns of D, or over k of op(B). */
static void bias_gradient(const Desc *d, const Layout *b, const void *B, const Layout *dd,
                          const void *D, uint64_t k, int type)
{
    int own = d->epilogue == BGRADB;
    for (int64_t i = 0; i < (int64_t)(own ? dd->cols : dd->rows); i++) {
        float sum = 0;
        for (int64_t x = 0; x < (int64_t)(own ? k : dd->cols); x++)
            sum += own ? load(B, b->type, d->op_b ? x * b->ld + i : i * b->ld + x)
                       : load(D, dd->type, x * dd->ld + i);
        store(d->bias, type, i, sum);
    }
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
    int status = cublasLtMatmulAlgoCheck(h, d, a, b, c, dd, o, &r);
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
    float scale = *alpha * (d->scale_a ? *(float *)d->scale_a : 1) * (d->scale_b ? *(float *)d->scale_b : 1);
    int bias_type = d->bias_type < 0 ? dd->type : d->bias_type;
    for (int64_t i = 0; i < dd->batch; i++)
        for (int64_t n = 0; n < (int64_t)dd->cols; n++)
            for (int64_t m = 0; m < (int64_t)dd->rows; m++) {
                float sum = 0;
                for (int64_t x = 0; x < (int64_t)k; x++)
                    sum += load(A, a->type, i * a->stride + (d->op_a ? m * a->ld + x : x * a->ld + m)) *
                           load(B, b->type, i * b->stride + (d->op_b ? x * b->ld + n : n * b->ld + x));
                sum *= scale;
                if (*beta != 0) sum += *beta * load(C, c->type, i * c->stride + n * c->ld + m);
                if (epi & BIAS) sum += load(d->bias, bias_type, m);
                if (epi & 32) {
                    store(d->aux, dd->type, n * d->aux_ld + m, sum);
                    sum *= 0.5f * (1 + tanhf(gelu_inner(sum)));
                } else if (epi & 64) {
                    float y = load(d->aux, dd->type, n * d->aux_ld + m), t = tanhf(gelu_inner(y));
                    sum *= 0.5f * (1 + t) + 0.5f * y * (1 - t * t) * 0.79788456f * (1 + 0.134145f * y * y);
                }
                store(D, dd->type, i * dd->stride + n * dd->ld + m, sum);
            }
    if (epi & 16 || epi == BGRADB) bias_gradient(d, b, B, dd, D, k, bias_type);
    last = *o;
    calls++;
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
