// What programs describe a multiplication with: layouts, a description of the operation, and preferences.
#pragma once
#include <memory>
#include <mutex>

#include "../driver/handles.h"
#include "api.h"

namespace stand_in::lt {

struct Layout {
    cudaDataType_t type = CUDA_R_32F;
    cublasLtOrder_t order = CUBLASLT_ORDER_COL;
    uint64_t rows = 0;
    uint64_t cols = 0;
    int64_t ld = 0;  // elements between two columns, or between two rows in row order
    int32_t batch_count = 1;
    int64_t batch_stride = 0;  // elements

    // Where an element lies.
    size_t at(size_t row, size_t col) const {
        const size_t stride = static_cast<size_t>(ld);
        return order == CUBLASLT_ORDER_COL ? col * stride + row : row * stride + col;
    }
};

inline constexpr cudaDataType_t TYPE_OF_OUTPUT = static_cast<cudaDataType_t>(-1);

// D = alpha * op(A) op(B) + beta * C + bias. The scales multiply A and B, and are read when the work runs.
struct Operation {
    cublasComputeType_t compute_type = CUBLAS_COMPUTE_32F;
    cudaDataType_t scale_type = CUDA_R_32F;  // of alpha and beta
    int32_t pointer_mode = 0;                // 0: alpha and beta are in host memory
    cublasOperation_t op_a = CUBLAS_OP_N;
    cublasOperation_t op_b = CUBLAS_OP_N;
    cublasOperation_t op_c = CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    CUdeviceptr bias = 0;  // an element for each row of D
    int64_t bias_batch_stride = 0;
    cudaDataType_t bias_type = TYPE_OF_OUTPUT;
    CUdeviceptr a_scale = 0;
    CUdeviceptr b_scale = 0;
    int32_t sm_count_target = 0;
    int8_t fast_accum = 0;
};

struct Preference {
    uint32_t search_mode = 0;
    uint64_t max_workspace_bytes = 0;
    uint32_t reduction_scheme_mask = 7;
    // Of the addresses that the algorithm will get. cuBLASLt assumes 256 unless it is told otherwise.
    uint32_t min_alignment_bytes[4] = {256, 256, 256, 256};  // A, B, C, D
    float max_num_waves = 0.0f;
};

struct Library {
    std::mutex mutex;
    Handles<int, cublasLtHandle_t> handles;
    Handles<Layout, cublasLtMatrixLayout_t> layouts;
    Handles<Operation, cublasLtMatmulDesc_t> operations;
    Handles<Preference, cublasLtMatmulPreference_t> preferences;
};

Library& library();

// Copies of what a call names; null if it was destroyed, or never was.
std::unique_ptr<const Layout> find_layout(cublasLtMatrixLayout_t handle);
std::unique_ptr<const Operation> find_operation(cublasLtMatmulDesc_t handle);
std::unique_ptr<const Preference> find_preference(cublasLtMatmulPreference_t handle);

// Says why a call is refused, and returns the status.
[[gnu::format(printf, 2, 3)]] cublasStatus_t refuse(cublasStatus_t status, const char* format, ...);

}  // namespace stand_in::lt
