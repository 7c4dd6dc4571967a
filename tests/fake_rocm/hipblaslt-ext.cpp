// The C++ face of tests/fake_hipblaslt.c.
#include <hipblaslt/hipblaslt-ext.hpp>

extern "C" size_t fake_all(hipblasLtMatmulAlgo_t *to, size_t room);
extern "C" int fake_need(void *handle, const void *desc, const void *a, const void *b, const void *c,
                         const void *d, const hipblasLtMatmulAlgo_t *algo, size_t *need);

namespace hipblaslt_ext
{
hipblasStatus_t getAllAlgos(hipblasLtHandle_t, GemmType, hipblasOperation_t, hipblasOperation_t,
                            hipDataType, hipDataType, hipDataType, hipDataType, hipblasComputeType_t,
                            std::vector<hipblasLtMatmulHeuristicResult_t> &results)
{
    std::vector<hipblasLtMatmulAlgo_t> all(fake_all(nullptr, 0));
    fake_all(all.data(), all.size());
    results.clear();
    for (const auto &algo : all) results.push_back({algo, 0, HIPBLAS_STATUS_SUCCESS, 1, {}});
    return HIPBLAS_STATUS_SUCCESS;
}

hipblasStatus_t matmulIsAlgoSupported(hipblasLtHandle_t handle, hipblasLtMatmulDesc_t desc,
                                      const void *, hipblasLtMatrixLayout_t a,
                                      hipblasLtMatrixLayout_t b, const void *,
                                      hipblasLtMatrixLayout_t c, hipblasLtMatrixLayout_t d,
                                      hipblasLtMatmulAlgo_t &algo, size_t &workspace)
{
    return static_cast<hipblasStatus_t>(fake_need(handle, desc, a, b, c, d, &algo, &workspace));
}
}
