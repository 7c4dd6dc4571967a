/* What differs between the vendors' libraries: names, numbers and sizes, declared here so that no
 * vendor's headers are needed. NVIDIA's are those of cublasLt.h, cublas_api.h, library_types.h and
 * cuda.h, the same in CUDA 12 and 13. AMD's (GEMMTUNE_HIP) are those of hipblaslt.h, hipblas-common.h and
 * hip_runtime_api.h, of ROCm 6 and 7; that build has not yet run on an AMD GPU. Of hipBLAS nothing is
 * caught: on gfx90a, gfx942 and gfx950 torch too goes to hipBLASLt unasked (Context::blasPreferredBackend),
 * and what hipBLAS launches are rocBLAS's solutions, which no algorithm of hipBLASLt can stand in for. */
#ifndef GEMMTUNE_VENDOR_H
#define GEMMTUNE_VENDOR_H

#include <stddef.h>
#include <stdint.h>

#ifdef GEMMTUNE_HIP

#define LT_LIBRARY "libhipblaslt.so"
#define DRIVER_LIBRARY "libamdhip64.so"

#define LT(name) hipblasLt##name
#define LT_NAME(name) "hipblasLt" #name

/* An algorithm is its structure's words; as settings they are halves, the first two its id. */
enum { ALGO_WORDS = 3, SETTINGS = 2 * ALGO_WORDS };

enum { STATUS_SUCCESS = 0, STATUS_NOT_INITIALIZED = 1 };

enum { TYPE_32F = 0, TYPE_64F = 1, TYPE_16F = 2, TYPE_16BF = 14 };

enum { COMPUTE_32F = 2, COMPUTE_64F = 7 };

enum { OP_N = 111 };

enum { TYPE_UNSET = 255 }; /* HIPBLASLT_DATATYPE_INVALID */

enum { MOST_ALIGN = 16 };

enum { ORDER_COLUMN = 0 };

enum { POINTERS_ON_HOST = 0 };

enum { BATCH_STRIDED = 0 }; /* the others: by arrays of pointers, in groups */

enum { EPILOGUE_NONE = 1, EPILOGUE_HAS_BIAS = 4 | 16 | 256 | 512 };

/* Of these the library tells BATCH and STRIDE alone: kept.c has them all. */
enum {
    LAYOUT_BATCH = 0,
    LAYOUT_STRIDE = 1,
    LAYOUT_TYPE = 2,
    LAYOUT_ORDER = 3,
    LAYOUT_ROWS = 4,
    LAYOUT_COLUMNS = 5,
    LAYOUT_LD = 6,
    LAYOUT_BATCH_MODE = -1, /* there is none */
};

enum {
    DESC_FAST_ACCUM = -3, /* there is none */
    DESC_COMPUTE = -2, /* no attributes of the library's: kept.c has them */
    DESC_SCALE_TYPE = -1,
    DESC_TRANS_A = 0,
    DESC_TRANS_B = 1,
    DESC_EPILOGUE = 2,
    DESC_BIAS_TYPE = 4,
    DESC_POINTER_MODE = 13,
    DESC_A_SCALE_MODE = 31, /* these are unknown to builds before 2025 */
    DESC_B_SCALE_MODE = 32,
    DESC_SM_COUNT = 33,
};

enum { PREFERENCE_WORKSPACE = 1 };

typedef int LtHeuristic(void *handle, void *desc, void *a, void *b, void *c, void *d,
                        void *preference, int wanted, void *results, int *found);
typedef int LtPreferenceCreate(void **made);

/* A device stands for its context: its number, of which the runtime writes an int. */
enum { DEVICES_AS_CONTEXTS = 1 };
#define DRIVER_GET_CONTEXT "hipGetDevice"
#define DRIVER_IS_CAPTURING "hipStreamIsCapturing"
#define DRIVER_EXCHANGE_CAPTURE_MODE "hipThreadExchangeStreamCaptureMode"
#define DRIVER_EVENT_CREATE "hipEventCreateWithFlags"
#define DRIVER_EVENT_RECORD "hipEventRecord"
#define DRIVER_EVENT_QUERY "hipEventQuery"
#define DRIVER_EVENT_ELAPSED "hipEventElapsedTime"

#else

#define LT_LIBRARY "libcublasLt.so" /* how the names of loaded files begin */
#define BLAS_LIBRARY "libcublas.so"
#define DRIVER_LIBRARY "libcuda.so"

#define LT(name) cublasLt##name
#define LT_NAME(name) "cublasLt" #name
#define BLAS(name) cublas##name
#define BLAS_NAME(name) "cublas" #name

enum { ALGO_WORDS = 8 }; /* 64-bit words of an algorithm's structure */

/* An algorithm's settings by their attributes' numbers, the first its id; the last two have 2 bytes. */
enum { SETTINGS = 9, SETTING_ID = 0, FIRST_SHORT_SETTING = 7 };

enum { STATUS_SUCCESS = 0, STATUS_NOT_INITIALIZED = 1 };

enum { TYPE_32F = 0, TYPE_64F = 1, TYPE_16F = 2, TYPE_16BF = 14, TYPE_8F_E4M3 = 28, TYPE_8F_E5M2 = 29 };

enum { COMPUTE_32F = 68, COMPUTE_64F = 70 };

enum { OP_N = 0 };

enum { TYPE_UNSET = -1 }; /* of a bias: D's type */

enum { MOST_ALIGN = 16 }; /* bytes: no algorithm asks for more of an operand */

enum { ORDER_COLUMN = 0 };

enum { POINTERS_ON_HOST = 0 };

enum { BATCH_STRIDED = 0 }; /* the others: by arrays of pointers, in groups */

enum { EPILOGUE_NONE = 1, EPILOGUE_HAS_BIAS = 4 | 16 | 256 | 512 }; /* bias; gradients of it */

enum {
    LAYOUT_TYPE = 0,
    LAYOUT_ORDER = 1,
    LAYOUT_ROWS = 2,
    LAYOUT_COLUMNS = 3,
    LAYOUT_LD = 4,
    LAYOUT_BATCH = 5,
    LAYOUT_STRIDE = 6,
    LAYOUT_BATCH_MODE = 8, /* unknown to CUDA before 13 */
};

enum {
    DESC_COMPUTE = 0,
    DESC_SCALE_TYPE = 1,
    DESC_POINTER_MODE = 2,
    DESC_TRANS_A = 3,
    DESC_TRANS_B = 4,
    DESC_EPILOGUE = 7,
    DESC_SM_COUNT = 15,
    DESC_FAST_ACCUM = 25,
    DESC_BIAS_TYPE = 26,
    DESC_A_SCALE_MODE = 31, /* unknown to CUDA before 12.8 */
    DESC_B_SCALE_MODE = 32,
};

enum { DEVICES_AS_CONTEXTS = 0 };
#define DRIVER_GET_CONTEXT "cuCtxGetCurrent"
#define DRIVER_IS_CAPTURING "cuStreamIsCapturing"
#define DRIVER_EXCHANGE_CAPTURE_MODE "cuThreadExchangeStreamCaptureMode"
#define DRIVER_EVENT_CREATE "cuEventCreate"
#define DRIVER_EVENT_RECORD "cuEventRecord"
#define DRIVER_EVENT_QUERY "cuEventQuery"
#define DRIVER_EVENT_ELAPSED "cuEventElapsedTime"

#endif

typedef int LtMatmul(void *handle, void *desc, const void *alpha, const void *a, void *a_layout,
                     const void *b, void *b_layout, const void *beta, const void *c,
                     void *c_layout, void *d, void *d_layout, const void *algo, void *workspace,
                     size_t ws_bytes, void *stream);
typedef int LtGet(void *of, int attribute, void *to, size_t size, size_t *written);
typedef int LtSet(void *of, int attribute, const void *from, size_t size);
typedef int LtLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t ld);
typedef int LtDescCreate(void **made, int compute, int scale_type);
typedef int LtDestroy(void *of);

typedef struct {
    uint64_t algo[ALGO_WORDS];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} LtResult;
typedef int LtAlgoInit(void *handle, int compute, int scale, int a, int b, int c, int d, int id,
                       uint64_t *algo);
typedef int LtAlgoSet(uint64_t *algo, int attribute, const void *from, size_t size);
typedef int LtAlgoCheck(void *handle, void *desc, void *a, void *b, void *c, void *d,
                        const uint64_t *algo, LtResult *result);

typedef int BlasGemm(void *handle, int trans_a, int trans_b, int m, int n, int k,
                     const void *alpha, const void *a, int a_type, int lda, const void *b,
                     int b_type, int ldb, const void *beta, void *c, int c_type, int ldc,
                     int compute, int algo);
typedef int BlasBatched(void *handle, int trans_a, int trans_b, int m, int n, int k,
                        const void *alpha, const void *a, int a_type, int lda, long long stride_a,
                        const void *b, int b_type, int ldb, long long stride_b, const void *beta,
                        void *c, int c_type, int ldc, long long stride_c, int batch, int compute,
                        int algo);
typedef int BlasSingle(void *handle, int trans_a, int trans_b, int m, int n, int k,
                       const float *alpha, const float *a, int lda, const float *b, int ldb,
                       const float *beta, float *c, int ldc);
typedef int BlasSingleBatched(void *handle, int trans_a, int trans_b, int m, int n, int k,
                              const float *alpha, const float *a, int lda, long long stride_a,
                              const float *b, int ldb, long long stride_b, const float *beta,
                              float *c, int ldc, long long stride_c, int batch);
typedef int BlasSetWorkspace(void *handle, void *workspace, size_t bytes);
typedef int BlasSetStream(void *handle, void *stream);
typedef int BlasGetStream(void *handle, void **stream);
typedef int BlasGetPointerMode(void *handle, int *mode);
typedef int BlasDestroy(void *handle);

/* The driver's functions; a stream of the runtime is one of the driver's. */
enum { DRIVER_NOT_READY = 600 };
enum { CAPTURE_NONE = 0, CAPTURE_MODE_RELAXED = 2 };

typedef int DriverGetContext(void **context);
typedef int DriverIsCapturing(void *stream, int *status);
typedef int DriverExchangeCaptureMode(int *mode);
typedef int DriverEventCreate(void **event, unsigned flags);
typedef int DriverEventRecord(void *event, void *stream);
typedef int DriverEventQuery(void *event);
typedef int DriverEventElapsed(float *ms, void *start, void *end);

#endif
