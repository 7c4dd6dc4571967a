/* A job's own library, linked to cuBLASLt, cuBLAS and the driver (with HIP to hipBLASLt) as torch's are: what it calls is
 * caught if a preloaded library has it. With MAIN the program that opens that library privately and
 * calls it from many threads, while another one chooses, drains and forks. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct {
    int32_t m, n, k, trans_a, trans_b, type_a, type_b, type_d, epi, bias_type, fast, batch, lda, ldb, ldd;
    int32_t offset; /* of A's address, in bytes */
    int32_t batch_mode;
    float beta;
    uint64_t ws_bytes;
    int32_t settings[9], api; /* the job's own algorithm, by attributes' numbers; 0 lt, 1, 2 gemmex, 3, 4 sgemm */
    void *stream;
} Spec;

#ifdef HIP
#define LT(name) hipblasLt##name
enum { F32 = 2, OP = 0, EPILOGUE = 2, BIAS = 3, BIAS_TYPE = 4, BATCH = 0, STRIDE = 1, N = 111, WORDS = 3 };
#else
#define LT(name) cublasLt##name
enum { F32 = 68, OP = 3, EPILOGUE = 7, BIAS = 8, BIAS_TYPE = 26, BATCH = 5, STRIDE = 6, N = 0, WORDS = 8 };
#endif

#ifndef MAIN
int LT(Create)(void **), LT(MatrixLayoutCreate)(void **, int, uint64_t, uint64_t, int64_t);
int LT(MatrixLayoutSetAttribute)(void *, int, const void *, size_t);
int LT(MatrixLayoutDestroy)(void *), LT(MatmulDescCreate)(void **, int, int);
int LT(MatmulDescSetAttribute)(void *, int, const void *, size_t), LT(MatmulDescDestroy)(void *);
int LT(MatmulAlgoInit)(void *, int, int, int, int, int, int, int, void *);
int LT(MatmulAlgoConfigSetAttribute)(void *, int, const void *, size_t);
int LT(Matmul)(void *, void *, const void *, const void *, void *, const void *, void *,
                   const void *, const void *, void *, void *, void *, const void *, void *, size_t,
                   void *);
#ifndef HIP
int cublasCreate_v2(void **), cublasSetStream_v2(void *, void *);
int cublasSetWorkspace_v2(void *, void *, size_t), cublasDestroy_v2(void *);
int cublasGemmEx(void *, int, int, int, int, int, const void *, const void *, int, int, const void *,
                 int, int, const void *, void *, int, int, int, int);
int cublasGemmStridedBatchedEx(void *, int, int, int, int, int, const void *, const void *, int, int,
                               long long, const void *, int, int, long long, const void *, void *,
                               int, int, long long, int, int, int);
int cublasSgemm_v2(void *, int, int, int, int, int, const float *, const float *, int, const float *,
                   int, const float *, float *, int);
int cublasSgemmStridedBatched(void *, int, int, int, int, int, const float *, const float *, int,
                              long long, const float *, int, long long, const float *, float *, int,
                              long long, int);
#endif

static void *layout(const Spec *s, int type, int rows, int cols, int ld)
{
    void *made;
    int64_t stride = (int64_t)ld * cols;
    if (LT(MatrixLayoutCreate)(&made, type, (uint64_t)rows, (uint64_t)cols, ld)) abort();
    LT(MatrixLayoutSetAttribute)(made, BATCH, &s->batch, 4);
    LT(MatrixLayoutSetAttribute)(made, STRIDE, &stride, 8);
    if (s->batch_mode) LT(MatrixLayoutSetAttribute)(made, 8, &s->batch_mode, 4);
    return made;
}

static int lt(const Spec *s, long times, char *a, char *b, char *d, void *ws, float *out)
{
    static _Thread_local void *handle;
    void *desc;
    uint64_t algo[WORDS] = {0};
    float alpha = 1;
    int has_algo = s->settings[0] != 0, status = 0;
    if (!handle && LT(Create)(&handle)) return 1;
    void *bias = b; /* any memory */
    if (LT(MatmulDescCreate)(&desc, F32, 0)) return 1;
    LT(MatmulDescSetAttribute)(desc, OP, &s->trans_a, 4);
    LT(MatmulDescSetAttribute)(desc, OP + 1, &s->trans_b, 4);
    LT(MatmulDescSetAttribute)(desc, EPILOGUE, &s->epi, 4);
    if (s->epi != 1) LT(MatmulDescSetAttribute)(desc, BIAS, &bias, 8);
    if (s->bias_type >= 0) LT(MatmulDescSetAttribute)(desc, BIAS_TYPE, &s->bias_type, 4);
#ifndef HIP
    int8_t fast = (int8_t)s->fast;
    if (fast) LT(MatmulDescSetAttribute)(desc, 25, &fast, 1);
#endif
    void *la = layout(s, s->type_a, s->trans_a != N ? s->k : s->m, s->trans_a != N ? s->m : s->k, s->lda);
    void *lb = layout(s, s->type_b, s->trans_b != N ? s->n : s->k, s->trans_b != N ? s->k : s->n, s->ldb);
    void *ld = layout(s, s->type_d, s->m, s->n, s->ldd);
#ifdef HIP
    /* A solution's index, and from the tenth byte on the workspace that it may use: a MiB. */
    algo[0] = (uint64_t)s->settings[0];
    algo[1] = 1 << 28;
#else
    if (has_algo) {
        status = LT(MatmulAlgoInit)(handle, 68, 0, s->type_a, s->type_b, s->type_d, s->type_d,
                                        s->settings[0], algo);
        for (int i = 1; i < 9 && !status; i++)
            status = LT(MatmulAlgoConfigSetAttribute)(algo, i, &s->settings[i], i < 7 ? 4 : 2);
    }
#endif
    for (long i = 0; i < times && !status; i++)
        status = LT(Matmul)(handle, desc, &alpha, a, la, b, lb, &s->beta, d, ld, d, ld,
                                has_algo ? algo : NULL, s->ws_bytes ? ws : NULL, s->ws_bytes,
                                s->stream);
    LT(MatrixLayoutDestroy)(la);
    LT(MatrixLayoutDestroy)(lb);
    LT(MatrixLayoutDestroy)(ld);
    LT(MatmulDescDestroy)(desc);
    memcpy(out, d, sizeof *out);
    return status;
}

#ifdef HIP
#define older(...) 1
#else
static int older(const Spec *s, long times, char *a, char *b, char *d, void *ws)
{
    static _Thread_local void *handle;
    float alpha = 1;
    int status = 0;
    if (!handle && cublasCreate_v2(&handle)) return 1;
    for (long i = 0; i < times && !status; i++) {
        cublasSetStream_v2(handle, s->stream);
        if (s->ws_bytes) cublasSetWorkspace_v2(handle, ws, s->ws_bytes);
        long long sa = (long long)s->lda * (s->trans_a ? s->m : s->k);
        long long sb = (long long)s->ldb * (s->trans_b ? s->k : s->n);
        long long sd = (long long)s->ldd * s->n;
        const float *x = (float *)a, *y = (float *)b;
        if (s->api == 3)
            status = cublasSgemm_v2(handle, s->trans_a, s->trans_b, s->m, s->n, s->k, &alpha, x,
                                    s->lda, y, s->ldb, &s->beta, (float *)d, s->ldd);
        else if (s->api == 4)
            status = cublasSgemmStridedBatched(handle, s->trans_a, s->trans_b, s->m, s->n, s->k,
                                               &alpha, x, s->lda, sa, y, s->ldb, sb, &s->beta,
                                               (float *)d, s->ldd, sd, s->batch);
        else
            status = s->api == 1
                     ? cublasGemmEx(handle, s->trans_a, s->trans_b, s->m, s->n, s->k, &alpha, a,
                                    s->type_a, s->lda, b, s->type_b, s->ldb, &s->beta, d, s->type_d,
                                    s->ldd, 68, -1)
                     : cublasGemmStridedBatchedEx(handle, s->trans_a, s->trans_b, s->m, s->n, s->k,
                                                  &alpha, a, s->type_a, s->lda, sa, b, s->type_b,
                                                  s->ldb, sb, &s->beta, d, s->type_d, s->ldd, sd,
                                                  s->batch, 68, -1);
    }
    return status;
}
#endif

/* Runs a GEMM `times` times on ones; its status, and the first of the result. */
int job_gemm(const Spec *s, long times, float *out)
{
    char *a = aligned_alloc(256, 1 << 16), *b = aligned_alloc(256, 1 << 16);
    char *d = aligned_alloc(256, 1 << 16), *ws = aligned_alloc(256, 1 << 16);
    for (int i = 0; i < 1 << 14; i++) ((float *)a)[i] = ((float *)b)[i] = 1;
    memset(d, 0, 1 << 16);
    int status = s->api ? older(s, times, a + s->offset, b, d, ws) : lt(s, times, a + s->offset, b, d, ws, out);
    memcpy(out, d, sizeof *out);
    free(a), free(b), free(d), free(ws);
    return status;
}

/* Runs a GEMM on the caller's memory; its status. */
int job_gemm_on(const Spec *s, char *a, char *b, char *d)
{
    static _Thread_local _Alignas(256) char ws[1 << 16];
    float out;
    return s->api ? older(s, 1, a, b, d, ws) : lt(s, 1, a, b, d, ws, &out);
}

#else

static int (*gemm)(const Spec *, long, float *);
static void (*device)(int), (*capture)(int);
static long each;
static _Atomic int done;

static Spec spec(long i)
{
    Spec s = {.m = 8, .n = 8, .k = 8 + 8 * (int)(i % 7), .type_a = 0, .type_b = 0, .epi = 1,
              .bias_type = -1, .batch = 1, .ws_bytes = 4096};
#ifdef HIP
    s.trans_a = 112, s.trans_b = 111, s.settings[0] = 1000;
#else
    s.trans_a = 1, s.settings[0] = 20, s.settings[1] = 15, s.settings[2] = 1, s.api = (int)(i % 5);
#endif
    s.lda = s.ldb = s.k;
    s.ldd = s.m;
    return s;
}

static void *work(void *number)
{
    float out;
    long failed = 0, own = (long)number;
    device(own % 2);
    for (long i = 0; i < each; i++) {
        Spec s = spec(i + own);
        s.stream = (void *)(own + 1);
        if (!own) capture(i & 8); /* the first one's stream is in and out of a graph */
        failed += gemm(&s, 1, &out) != 0 || out != (float)s.k;
    }
    if (!own) capture(0);
    return (void *)failed;
}

/* What is drained begins with a key and an algorithm and ends with id, applied, calls, timed and time. */
#ifdef HIP
enum { ALGO = 24, SETTINGS = 32 }; /* the latter with what fills up a row */
static const uint32_t settings[9] = {1017};
#else
enum { ALGO = 64, SETTINGS = 40 };
static const uint32_t settings[9] = {20, 20, 1};
#endif
enum { ROOM = 64, KEY = 144, LAUNCH = KEY + ALGO + 40, ROW = KEY + SETTINGS };
static uint64_t calls, applied;

static void *meddle(void *unused)
{
    static _Alignas(8) char rows[ROOM][ROW], got[ROOM][LAUNCH];
    size_t (*drain)(void *, size_t) = (size_t(*)(void *, size_t))dlsym(RTLD_DEFAULT, "gemmtune_drain");
    int (*choose)(void *, size_t) = (int (*)(void *, size_t))dlsym(RTLD_DEFAULT, "gemmtune_choose");
    size_t known = 0;
    for (int last = 0; !last;) {
        last = done;
        size_t found = drain(got, ROOM);
        for (size_t i = 0; i < found; i++) {
            uint64_t counts[4];
            memcpy(counts, got[i] + KEY + ALGO + 8, sizeof counts);
            calls += counts[1];
            applied += counts[0] ? counts[1] : 0;
            if (!counts[0] && known < ROOM) {
                memcpy(rows[known], got[i], KEY);
                memcpy(rows[known++] + KEY, settings, ALGO == 24 ? 24 : sizeof settings);
            }
        }
        choose(rows, known % 5 ? known : 0);
        pid_t child = last ? -1 : fork();
        if (!child) {
            found = drain(got, ROOM);
            _exit(found != 0);
        }
        int status = 0;
        if (child > 0 && (waitpid(child, &status, 0) < 0 || status)) abort();
        usleep(2000);
    }
    return unused;
}

int main(int argc, char **argv)
{
    uint64_t why[16] = {0};
    void *job = argc > 4 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    void (*mode)(unsigned) = (void (*)(unsigned))dlsym(RTLD_DEFAULT, "gemmtune_mode");
    if (!job || !mode) return fprintf(stderr, "%s\n", job ? "not preloaded" : dlerror()), 2;
    gemm = (int (*)(const Spec *, long, float *))dlsym(job, "job_gemm");
    device = (void (*)(int))dlsym(job, "fake_device");
    capture = (void (*)(int))dlsym(job, "fake_capture");
    int threads = atoi(argv[2]), (*violations)(void) = (int (*)(void))dlsym(job, "fake_violations");
    each = atol(argv[3]);
    pthread_t workers[64], other;
    long failed = 0;
    ((void (*)(int))dlsym(job, "fake_misfortune"))(atoi(argv[4]));
    mode(3);
    pthread_create(&other, NULL, meddle, NULL);
    for (long i = 0; i < threads; i++) pthread_create(&workers[i], NULL, work, (void *)i);
    for (int i = 0; i < threads; i++) {
        void *result;
        pthread_join(workers[i], &result);
        failed += (long)result;
    }
    done = 1;
    pthread_join(other, NULL);
    ((size_t(*)(uint64_t *, size_t))dlsym(RTLD_DEFAULT, "gemmtune_faults"))(why, 16);
    printf("%lu %lu %lu %ld %d\n", (unsigned long)calls, (unsigned long)applied, (unsigned long)why[1],
           failed, violations());
    return 0;
}
#endif
