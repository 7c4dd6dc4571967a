// What only hipBLASLt's C++ interface has, under C names: all algorithms of some types, and whether
// one of them can run a problem. Built by hipblaslt_ext.py where ROCm's headers are. Written from
// hipblaslt-ext.hpp; not yet run on an AMD GPU.
#include <cstddef>
#include <vector>

#include <hipblaslt/hipblaslt-ext.hpp>

// `types`: the operations of A and B, the types of A, B, C and D, the compute type. Writes up to
// `room` algorithms; `found` is how many there are.
extern "C" int gemmtune_all_algos(hipblasLtHandle_t handle, const int *types,
                                  hipblasLtMatmulAlgo_t *to, size_t room, size_t *found)
{
    try {
        std::vector<hipblasLtMatmulHeuristicResult_t> results;
        auto status = hipblaslt_ext::getAllAlgos(
            handle, hipblaslt_ext::GemmType::HIPBLASLT_GEMM,
            static_cast<hipblasOperation_t>(types[0]), static_cast<hipblasOperation_t>(types[1]),
            static_cast<hipDataType>(types[2]), static_cast<hipDataType>(types[3]),
            static_cast<hipDataType>(types[4]), static_cast<hipDataType>(types[5]),
            static_cast<hipblasComputeType_t>(types[6]), results);
        *found = results.size();
        for (size_t i = 0; i < results.size() && i < room; i++) to[i] = results[i].algo;
        return status;
    } catch (...) {
        return HIPBLAS_STATUS_INTERNAL_ERROR;
    }
}

// Success where the algorithm can run the problem; `need` is the workspace that it takes then.
extern "C" int gemmtune_algo_need(hipblasLtHandle_t handle, hipblasLtMatmulDesc_t desc,
                                  hipblasLtMatrixLayout_t a, hipblasLtMatrixLayout_t b,
                                  hipblasLtMatrixLayout_t c, hipblasLtMatrixLayout_t d,
                                  const hipblasLtMatmulAlgo_t *algo, size_t *need)
{
    const float one = 1; // for alpha and beta, as the library's own list is made
    auto copy = *algo;
    try {
        return hipblaslt_ext::matmulIsAlgoSupported(handle, desc, &one, a, b, &one, c, d, copy, *need);
    } catch (...) {
        return HIPBLAS_STATUS_INTERNAL_ERROR;
    }
}
