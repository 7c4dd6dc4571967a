/* What the stand-ins for cuBLASLt and hipBLASLt share: their objects, on CPU memory, and arithmetic.
 * The including file names its library's functions, statuses and types, and its algorithms. */
#ifndef FAKE_LT_H
#define FAKE_LT_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PLAIN = 1, BIAS = 4, GELU_AUX = 160, GELU_AUX_BIAS = 164, DGELU = 192, DGELU_BGRAD = 208,
       BGRADB = 512 };
enum { MAGIC = 0x17ce11 };

typedef struct { int type; uint64_t rows, cols; int64_t ld, stride; int32_t batch, mode; } Layout;
typedef struct {
    int compute, scale, pointers, op_a, op_b, bias_type;
    uint32_t epilogue;
    void *bias, *aux, *scale_a, *scale_b;
    int64_t aux_ld;
    int8_t fast;
} Desc;
typedef struct { uint64_t workspace; uint32_t align[4]; } Pref;

static _Atomic int live; /* descriptors not destroyed: what a test asks for */
int fake_live(void) { return live; }

static _Atomic uint64_t calls; /* launches that worked, by whatever name */
uint64_t fake_calls(void) { return calls; }

static _Atomic int failing = -1; /* an attribute of descriptions that cannot be read, for a test */
void fake_fail(int attribute) { failing = attribute; }

/* With `one_in` above 0 calls that no job makes fail so often, for no reason: gemmtune's reading and
 * checking, and launches of the algorithms that the tests choose. */
static _Atomic int one_in;
void fake_misfortune(int often) { one_in = often; }
int fake_unlucky(void)
{
    static _Thread_local uint32_t state = 1;
    state = state * 1664525 + 1013904223;
    return one_in > 0 && (state >> 8) % (uint32_t)one_in == 0;
}

static _Thread_local Opaque last; /* the algorithm of this thread's last launch */
const void *fake_last(void) { return &last; }

static size_t bytes(int type)
{
    switch (type) {
    case R_32F: return 4;
    case R_16F: case R_16BF: return 2;
    }
    return is8(type);
}

int LT(Create)(void **handle)
{
    if (!handle) return INVALID;
    *handle = malloc(4);
    *(int *)*handle = MAGIC;
    return OK;
}

int LT(Destroy)(void *handle) { free(handle); return OK; }

static int is_handle(const void *handle) { return handle && *(const int *)handle == MAGIC; }

static void *made(size_t size) { live++; return calloc(1, size); }
static int destroyed(void *p) { if (!p) return INVALID; live--; free(p); return OK; }

int LT(MatrixLayoutCreate)(Layout **out, int type, uint64_t rows, uint64_t cols, int64_t ld)
{
    if (!out || !bytes(type)) return INVALID;
    *out = made(sizeof **out);
    **out = (Layout){type, rows, cols, ld, 0, 1, 0};
    return OK;
}

int LT(MatrixLayoutDestroy)(Layout *l) { return destroyed(l); }

int LT(MatmulDescCreate)(Desc **out, int compute, int scale)
{
    if (!out || compute != COMPUTE_32F || scale != R_32F) return INVALID;
    *out = made(sizeof **out);
    **out = (Desc){.compute = compute, .scale = scale, .op_a = OP_N, .op_b = OP_N, .bias_type = UNSET,
                   .epilogue = PLAIN};
    return OK;
}

int LT(MatmulDescDestroy)(Desc *d) { return destroyed(d); }

int LT(MatmulPreferenceDestroy)(Pref *p) { return destroyed(p); }

static float small_float(unsigned v, int exponent_bits, int bias)
{
    int fnuz = bias == 8 || bias == 16; /* no negative zero: that is NaN */
    if (fnuz && v == 128) return NAN;
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
    }
    if (is8(type)) {
        int exponent_bits = is_e4m3(type) ? 4 : 5;
        return small_float(((const uint8_t *)p)[at], exponent_bits, (1 << (exponent_bits - 1)) - !is_fnuz(type));
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
            sum += own ? load(B, b->type, d->op_b != OP_N ? x * b->ld + i : i * b->ld + x)
                       : load(D, dd->type, x * dd->ld + i);
        store(d->bias, type, i, sum);
    }
}

/* Holds a launch up to the microseconds that FAKE_LT_US gives its algorithm: "71:400,66:50". */
static void hold_up(int id, const struct timespec *begun)
{
    const char *script = getenv("FAKE_LT_US");
    char at[16];
    snprintf(at, sizeof at, "%d:", id);
    while (script && strncmp(script, at, strlen(at)))
        script = (script = strchr(script, ',')) ? script + 1 : NULL;
    double us = script ? atof(script + strlen(at)) : 0, passed = 0;
    while (passed < us) {
        struct timespec now;
        timespec_get(&now, TIME_UTC);
        passed = (double)(now.tv_sec - begun->tv_sec) * 1e6 + (double)(now.tv_nsec - begun->tv_nsec) / 1e3;
    }
}

/* D = epilogue(alpha * op(A) * op(B) + beta * C): all that was checked before. */
static void multiply(const Desc *d, const float *alpha, const void *A, const Layout *a, const void *B,
                     const Layout *b, const float *beta, const void *C, const Layout *c, void *D,
                     const Layout *dd, uint64_t k, const Opaque *algo, int id)
{
    struct timespec begun;
    timespec_get(&begun, TIME_UTC);
    uint32_t epi = d->epilogue;
    float scale = *alpha * (d->scale_a ? *(float *)d->scale_a : 1) * (d->scale_b ? *(float *)d->scale_b : 1);
    int bias_type = d->bias_type == UNSET ? dd->type : d->bias_type;
    for (int64_t i = 0; i < dd->batch; i++)
        for (int64_t n = 0; n < (int64_t)dd->cols; n++)
            for (int64_t m = 0; m < (int64_t)dd->rows; m++) {
                float sum = 0;
                for (int64_t x = 0; x < (int64_t)k; x++)
                    sum += load(A, a->type, i * a->stride + (d->op_a != OP_N ? m * a->ld + x : x * a->ld + m)) *
                           load(B, b->type, i * b->stride + (d->op_b != OP_N ? x * b->ld + n : n * b->ld + x));
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
    last = *algo;
    calls++;
    hold_up(id, &begun);
}

#endif
