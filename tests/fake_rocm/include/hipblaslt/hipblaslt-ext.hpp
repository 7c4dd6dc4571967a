// What gemmtune's C++ helper uses of hipblaslt-ext.hpp and what that includes: the same names, types
// and order of arguments (ROCm/rocm-libraries, projects/hipblaslt/library/include), nothing else.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#if !defined(__HIP_PLATFORM_AMD__)
#error "hip_runtime.h wants a platform"
#endif

enum hipblasStatus_t { HIPBLAS_STATUS_SUCCESS = 0, HIPBLAS_STATUS_INTERNAL_ERROR = 6 };
enum hipblasOperation_t : int {};
enum hipDataType : int {};
enum hipblasComputeType_t : int {};
using hipblasLtHandle_t = void *;
struct hipblasLtMatmulDescOpaque_t;
using hipblasLtMatmulDesc_t = hipblasLtMatmulDescOpaque_t *;
struct hipblasLtMatrixLayoutOpaque_t;
using hipblasLtMatrixLayout_t = hipblasLtMatrixLayoutOpaque_t *;
struct hipblasLtMatmulAlgo_t {
    uint8_t data[16] = {0};
    size_t max_workspace_bytes = 0;
};
struct hipblasLtMatmulHeuristicResult_t {
    hipblasLtMatmulAlgo_t algo;
    size_t workspaceSize = 0;
    hipblasStatus_t state = HIPBLAS_STATUS_SUCCESS;
    float wavesCount = 1.0;
    int reserved[4];
};

namespace hipblaslt_ext
{
enum class GemmType { HIPBLASLT_GEMM = 1, HIPBLASLT_GROUPED_GEMM = 2 };

hipblasStatus_t getAllAlgos(hipblasLtHandle_t handle, GemmType type, hipblasOperation_t op_a,
                            hipblasOperation_t op_b, hipDataType a, hipDataType b, hipDataType c,
                            hipDataType d, hipblasComputeType_t compute,
                            std::vector<hipblasLtMatmulHeuristicResult_t> &results);

hipblasStatus_t matmulIsAlgoSupported(hipblasLtHandle_t handle, hipblasLtMatmulDesc_t desc,
                                      const void *alpha, hipblasLtMatrixLayout_t a,
                                      hipblasLtMatrixLayout_t b, const void *beta,
                                      hipblasLtMatrixLayout_t c, hipblasLtMatrixLayout_t d,
                                      hipblasLtMatmulAlgo_t &algo, size_t &workspace);
}
