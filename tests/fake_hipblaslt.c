/* A stand-in for libhipblaslt where there is no AMD GPU: the part of its C API that gemmtune and its
 * interposer call, on CPU memory. Written from hipblaslt.h and hipblas-common.h, and what its functions
 * answer from hipblaslt.cpp, rocblaslt_auxiliary.cpp, rocblaslt_mat.cpp and tensile_host.cpp (the last of
 * ROCm/hipBLASLt and ROCm/rocm-libraries, 2024 to 2025).
 *
 * As there: a size below an attribute's is refused, a larger one is not; a layout tells its batch alone;
 * a null handle or description is NOT_INITIALIZED; a list that asks for more than what is found best is
 * filled up with all else that can run the problem. FAKE_HIP_OLD=1 is a build that does not fill up yet,
 * FAKE_HIP_ARCH=gfx942 a GPU whose FP8 is FNUZ. Where the real one reads or writes out of bounds this
 * one refuses: a scale that is no float's address, a workspace that is too small, sizes that do not fit.
 */
#include <stddef.h>
#include <stdint.h>

#define LT(name) hipblasLt##name
enum { OK = 0, NOT_INITIALIZED = 1, INVALID = 3, INTERNAL = 6, INVALID_ENUM = 10 };
enum { R_32F = 0, R_16F = 2, R_16BF = 14, R_E4M3 = 28, R_E5M2 = 29, R_E4M3_FNUZ = 1000,
       R_E5M2_FNUZ = 1001, COMPUTE_32F = 2 };
enum { OP_N = 111, OP_T = 112, UNSET = 255 };

typedef struct { uint64_t data[3]; } Opaque; /* hipblasLtMatmulAlgo_t: 16 bytes and a size_t */
typedef struct { Opaque algo; size_t workspace; int state; float waves; int reserved[4]; } Result;
typedef struct __attribute__((packed, aligned(8))) {
    int32_t index, zero;
    uint8_t fallback;
    size_t workspace;
} Algo; /* rocblaslt_matmul_algo, as it lies in the public structure */

static int is_fnuz(int type) { return type == R_E4M3_FNUZ || type == R_E5M2_FNUZ; }
static int is8(int type) { return type == R_E4M3 || type == R_E5M2 || is_fnuz(type); }
static int is_e4m3(int type) { return type == R_E4M3 || type == R_E4M3_FNUZ; }

#include "fake_lt.h"

_Static_assert(sizeof(Algo) == sizeof(Opaque), "one structure in two spellings");

/* Solutions 1000, 1017, …; the library finds the first ones best, and fills up with the others. */
enum { SOLUTIONS = 40, BEST = 12, FIRST = 1000, STEP = 17 };
static int index_of(int number) { return FIRST + STEP * number; }
static int number_of(int index)
{
    int number = (index - FIRST) / STEP;
    return index >= FIRST && number < SOLUTIONS && index_of(number) == index ? number : -1;
}
static uint64_t align_of(int number) { return number % 3 == 2 ? 1 : 16; }
static uint64_t parts_of(int number) { return number % 5 == 3 ? 2 + (uint64_t)number % 3 : 1; } /* of k */

static int old_build(void) { return getenv("FAKE_HIP_OLD") != NULL; }

int hipblasLtGetVersion(void *handle, int *version)
{
    if (!handle) return NOT_INITIALIZED;
    *version = 1001; /* 0.10.1 */
    return OK;
}

int hipblasLtGetGitRevision(void *handle, char *revision)
{
    if (!handle) return NOT_INITIALIZED;
    if (!revision) return INVALID;
    strcpy(revision, "fa4e0001");
    return OK;
}

/* Copies a value into `to` where at least as much is given. */
static int take(void *to, size_t size, const void *buf, size_t given)
{
    if (!buf || given < size) return INVALID;
    memcpy(to, buf, size);
    return OK;
}

static int give(const void *from, size_t size, void *buf, size_t given, size_t *written)
{
    if ((!given && !written) || (given && !buf)) return INVALID;
    if (written) *written = size;
    if (given < size) return INVALID;
    memcpy(buf, from, size);
    return OK;
}

int hipblasLtMatrixLayoutSetAttribute(Layout *l, int attr, const void *buf, size_t size)
{
    int32_t order = 0;
    if (!l) return NOT_INITIALIZED;
    switch (attr) {
    case 0: return take(&l->batch, 4, buf, size);
    case 1: return take(&l->stride, 8, buf, size);
    case 2: return take(&l->type, 4, buf, size);
    case 3: return take(&order, 4, buf, size) || order ? INVALID : OK;
    case 4: return take(&l->rows, 8, buf, size);
    case 5: return take(&l->cols, 8, buf, size);
    case 6: return take(&l->ld, 8, buf, size);
    }
    return INVALID;
}

int hipblasLtMatrixLayoutGetAttribute(const Layout *l, int attr, void *buf, size_t size,
                                      size_t *written)
{
    if (!l) return NOT_INITIALIZED;
    switch (attr) { /* no more than these two */
    case 0: return give(&l->batch, 4, buf, size, written);
    case 1: return give(&l->stride, 8, buf, size, written);
    }
    return INVALID;
}

int hipblasLtMatmulDescSetAttribute(Desc *d, int attr, const void *buf, size_t size)
{
    if (!d) return NOT_INITIALIZED;
    switch (attr) {
    case 0: return take(&d->op_a, 4, buf, size);
    case 1: return take(&d->op_b, 4, buf, size);
    case 2: return take(&d->epilogue, 4, buf, size);
    case 3: return take(&d->bias, 8, buf, size);
    case 4: return take(&d->bias_type, 4, buf, size);
    case 5: return take(&d->scale_a, 8, buf, size);
    case 6: return take(&d->scale_b, 8, buf, size);
    case 10: return take(&d->aux, 8, buf, size);
    case 11: return take(&d->aux_ld, 8, buf, size);
    case 13: return take(&d->pointers, 4, buf, size);
    }
    return INVALID;
}

int hipblasLtMatmulDescGetAttribute(const Desc *d, int attr, void *buf, size_t size, size_t *written)
{
    if (!d) return NOT_INITIALIZED;
    if (attr == failing || fake_unlucky()) return INVALID;
    switch (attr) {
    case 0: return give(&d->op_a, 4, buf, size, written);
    case 1: return give(&d->op_b, 4, buf, size, written);
    case 2: return give(&d->epilogue, 4, buf, size, written);
    case 3: return give(&d->bias, 8, buf, size, written);
    case 4: return give(&d->bias_type, 4, buf, size, written);
    case 5: return give(&d->scale_a, 8, buf, size, written);
    case 6: return give(&d->scale_b, 8, buf, size, written);
    case 13: return give(&d->pointers, 4, buf, size, written);
    }
    return INVALID;
}

int hipblasLtMatmulPreferenceCreate(Pref **out)
{
    if (!out) return NOT_INITIALIZED;
    *out = made(sizeof **out);
    return OK;
}

int hipblasLtMatmulPreferenceSetAttribute(Pref *p, int attr, const void *buf, size_t size)
{
    if (!p || attr != 1) return INVALID;
    return take(&p->workspace, 8, buf, size);
}

static int types_fit(const Desc *d, const Layout *a, const Layout *b, const Layout *c, const Layout *dd)
{
    const char *arch = getenv("FAKE_HIP_ARCH");
    int fnuz = arch && !strcmp(arch, "gfx942");
    if (c->type != dd->type || d->compute != COMPUTE_32F) return 0;
    if (is8(a->type) || is8(b->type))
        return is8(a->type) && is8(b->type) && is_fnuz(a->type) == fnuz && is_fnuz(b->type) == fnuz &&
               !is8(dd->type);
    return a->type == b->type && (dd->type == a->type || dd->type == R_32F);
}

static int shapes_fit(const Desc *d, const Layout *a, const Layout *b, const Layout *c,
                      const Layout *dd, uint64_t *k)
{
    int an = d->op_a == OP_N, bn = d->op_b == OP_N;
    const Layout *all[4] = {a, b, c, dd};
    *k = an ? a->cols : a->rows;
    if ((an ? a->rows : a->cols) != dd->rows || (bn ? b->cols : b->rows) != dd->cols ||
        (bn ? b->rows : b->cols) != *k || c->rows != dd->rows || c->cols != dd->cols)
        return 0;
    for (int i = 0; i < 4; i++)
        if (all[i]->ld < (int64_t)all[i]->rows || all[i]->batch != dd->batch) return 0;
    return !is8(a->type) || *k % 16 == 0;
}

/* Success where the solution can run the problem: matmulIsAlgoSupported. */
int fake_need(void *handle, const Desc *d, const Layout *a, const Layout *b, const Layout *c,
              const Layout *dd, const Opaque *algo, size_t *need)
{
    uint64_t k;
    Algo own;
    if (!handle || !d || !a || !b || !c || !dd) return NOT_INITIALIZED;
    memcpy(&own, algo, sizeof own);
    int number = number_of(own.index);
    const Layout *all[3] = {a, b, dd};
    if (number < 0 || !types_fit(d, a, b, c, dd) || !shapes_fit(d, a, b, c, dd, &k)) return INVALID;
    for (int i = 0; i < 3; i++)
        if ((uint64_t)all[i]->ld * bytes(all[i]->type) % align_of(number)) return INVALID;
    uint64_t parts = parts_of(number);
    *need = parts == 1 ? 0 : 4 * parts * dd->rows * dd->cols * (uint64_t)dd->batch;
    return *need > own.workspace ? INVALID : OK;
}

/* All solutions, whatever they can run: getAllAlgos. */
size_t fake_all(Opaque *to, size_t room)
{
    for (int i = 0; i < SOLUTIONS && (size_t)i < room; i++) {
        Algo own = {.index = index_of(i), .workspace = SIZE_MAX};
        memcpy(&to[i], &own, sizeof own);
    }
    return SOLUTIONS;
}

int hipblasLtMatmulAlgoGetHeuristic(void *h, const Desc *d, const Layout *a, const Layout *b,
                                    const Layout *c, const Layout *dd, const Pref *p, int count,
                                    Result *r, int *found)
{
    if (!is_handle(h) || !d || !p || !a || !b || !c || !dd) return NOT_INITIALIZED;
    if (count < 1 || !r || !found) return INVALID;
    memset(r, 0, sizeof *r * (size_t)count);
    *found = 0;
    for (int i = 0; i < (old_build() ? BEST : SOLUTIONS) && *found < count; i++) {
        Algo own = {.index = index_of(i), .workspace = p->workspace};
        Result one = {.waves = 1};
        memcpy(&one.algo, &own, sizeof own);
        if (!fake_need(h, d, a, b, c, dd, &one.algo, &one.workspace)) r[(*found)++] = one;
    }
    for (int i = *found; i < count; i++) r[i].state = INVALID;
    return OK; /* with none found too */
}

int hipblasLtMatmul(void *h, const Desc *d, const float *alpha, const void *A, const Layout *a,
                    const void *B, const Layout *b, const float *beta, const void *C,
                    const Layout *c, void *D, const Layout *dd, const Opaque *algo, void *workspace,
                    size_t workspace_bytes, void *stream)
{
    uint64_t k = 0;
    size_t need;
    Result chosen;
    int found, status;
    Algo own;
    (void)stream;
    if (!is_handle(h) || !d || !a || !b || !c || !dd) return NOT_INITIALIZED;
    if (!alpha || !beta || !C || !D || (*alpha != 0 && (!A || !B))) return INVALID;
    if (!workspace && workspace_bytes) return INVALID;
    if (c->type != dd->type) return INVALID_ENUM; /* its type_mismatch has no word here */
    if (a->batch != dd->batch || b->batch != dd->batch || c->batch != dd->batch) return INVALID;
    uint32_t epi = d->epilogue;
    if ((epi & (BIAS | 16) || epi == BGRADB) && !d->bias) return INVALID;
    if (epi & 128 && (!d->aux || (d->aux_ld && d->aux_ld < (int64_t)dd->rows))) return INVALID;
    if (((uintptr_t)d->scale_a | (uintptr_t)d->scale_b) % sizeof(float)) return INVALID;
    if (!algo) {
        const Pref pref = {.workspace = workspace_bytes};
        status = hipblasLtMatmulAlgoGetHeuristic(h, d, a, b, c, dd, &pref, 1, &chosen, &found);
        if (status || !found) return status ? status : INTERNAL;
        algo = &chosen.algo;
    }
    memcpy(&own, algo, sizeof own);
    if (number_of(own.index) < 0) return INTERNAL; /* no such solution */
    if (own.index == 1017 && fake_unlucky()) return INVALID;
    if ((status = fake_need(h, d, a, b, c, dd, algo, &need))) return status;
    if (need > workspace_bytes) return INVALID;
    shapes_fit(d, a, b, c, dd, &k);
    multiply(d, alpha, A, a, B, b, beta, C, c, D, dd, k, algo, own.index);
    return OK;
}
