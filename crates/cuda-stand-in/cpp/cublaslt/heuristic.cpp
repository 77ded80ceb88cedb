#include <algorithm>
#include <cstring>

#include "numbers.h"
#include "plan.h"

namespace stand_in::lt {
namespace {

bool is_valid(const Layout& layout) {
    const uint64_t least = layout.order == CUBLASLT_ORDER_COL ? layout.rows : layout.cols;
    return layout.rows > 0 && layout.cols > 0 && layout.ld >= 0 && static_cast<uint64_t>(layout.ld) >= least &&
           layout.batch_count >= 1 && layout.batch_stride >= 0;
}

// Types of A and B, and of C and D. https://docs.nvidia.com/cuda/cublas, "cublasLtMatmul()"
bool are_supported(cudaDataType_t input, cudaDataType_t output) {
    switch (input) {
        case CUDA_R_32F: return output == CUDA_R_32F;
        case CUDA_R_16F: return output == CUDA_R_16F || output == CUDA_R_32F;
        case CUDA_R_16BF: return output == CUDA_R_16BF || output == CUDA_R_32F;
        case CUDA_R_8F_E4M3: return output == CUDA_R_16BF || output == CUDA_R_16F || output == CUDA_R_32F;
    }
    return false;
}

// Multiplications of FP8 on sm_89 and sm_90: only A transposed and B not, dimensions of 16.
bool is_fp8_supported(const Plan& plan) {
    const bool is_col =
        plan.a.order == CUBLASLT_ORDER_COL && plan.b.order == CUBLASLT_ORDER_COL && plan.d.order == CUBLASLT_ORDER_COL;
    return is_col && plan.operation.op_a == CUBLAS_OP_T && plan.operation.op_b == CUBLAS_OP_N && plan.m % 16 == 0 &&
           plan.k % 16 == 0 && plan.a.ld % 16 == 0 && plan.b.ld % 16 == 0;
}

}  // namespace

cublasStatus_t make_plan(cublasLtMatmulDesc_t operation_handle, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                         cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, Plan* plan) {
    const auto operation = find_operation(operation_handle);
    const auto layout_a = find_layout(a), layout_b = find_layout(b), layout_c = find_layout(c),
               layout_d = find_layout(d);
    if (!operation || !layout_a || !layout_b || !layout_c || !layout_d) return CUBLAS_STATUS_INVALID_VALUE;
    *plan = {*operation, *layout_a, *layout_b, *layout_c, *layout_d, layout_d->rows, layout_d->cols, 0};
    for (const Layout* layout : {&plan->a, &plan->b, &plan->c, &plan->d}) {
        if (!is_valid(*layout)) {
            return refuse(CUBLAS_STATUS_INVALID_VALUE,
                          "a layout of %llu x %llu elements with %lld between columns or rows",
                          static_cast<unsigned long long>(layout->rows), static_cast<unsigned long long>(layout->cols),
                          static_cast<long long>(layout->ld));
        }
        if (layout->order > CUBLASLT_ORDER_ROW) return CUBLAS_STATUS_NOT_SUPPORTED;
        if (layout->batch_count != plan->d.batch_count) return CUBLAS_STATUS_INVALID_VALUE;
    }
    const auto shape = [](const Layout& layout, cublasOperation_t op) {
        return op == CUBLAS_OP_N ? std::pair(layout.rows, layout.cols) : std::pair(layout.cols, layout.rows);
    };
    const auto [m, k] = shape(plan->a, operation->op_a);
    const auto [k_of_b, n] = shape(plan->b, operation->op_b);
    plan->k = k;
    if (m != plan->m || n != plan->n || k != k_of_b || plan->c.rows != plan->m || plan->c.cols != plan->n) {
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "op(A) is %llu x %llu, op(B) %llu x %llu, D %zu x %zu",
                      static_cast<unsigned long long>(m), static_cast<unsigned long long>(k),
                      static_cast<unsigned long long>(k_of_b), static_cast<unsigned long long>(n), plan->m, plan->n);
    }
    const bool sums_f32 = operation->compute_type == CUBLAS_COMPUTE_32F ||
                          operation->compute_type == CUBLAS_COMPUTE_32F_PEDANTIC ||
                          (operation->compute_type == CUBLAS_COMPUTE_32F_FAST_TF32 && plan->a.type == CUDA_R_32F);
    const bool is_known = plan->a.type == plan->b.type && plan->c.type == plan->d.type &&
                          are_supported(plan->a.type, plan->d.type) && sums_f32 &&
                          operation->scale_type == CUDA_R_32F && operation->pointer_mode == 0 &&
                          operation->op_c == CUBLAS_OP_N;
    const bool is_epilogue_known =
        operation->epilogue == CUBLASLT_EPILOGUE_DEFAULT || operation->epilogue == CUBLASLT_EPILOGUE_BIAS;
    if (!is_known || !is_epilogue_known) {
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "types %d x %d -> %d, compute type %d, epilogue %d", plan->a.type,
                      plan->b.type, plan->d.type, operation->compute_type, operation->epilogue);
    }
    if (plan->a.type == CUDA_R_8F_E4M3 && !is_fp8_supported(*plan)) {
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "FP8 needs A transposed, B not, and dimensions of 16");
    }
    return CUBLAS_STATUS_SUCCESS;
}

size_t workspace_bytes(const Plan& plan, const Algorithm& algorithm) {
    if (algorithm.num_splits == 1) return 0;
    return algorithm.num_splits * plan.m * plan.n * static_cast<size_t>(plan.d.batch_count) * sizeof(float);
}

// The fewer columns, the more parts: as on a GPU, where a single column would leave most of the machine idle.
std::vector<Algorithm> find_algorithms(const Plan& plan, const Preference& preference, size_t max_algorithms) {
    const uint64_t preferred = plan.k < 64 || plan.n > 64 ? 1 : plan.n > 16 ? 2 : 4;
    std::vector<Algorithm> found;
    for (const uint64_t num_splits : {preferred, uint64_t{1}, uint64_t{2}, uint64_t{4}}) {
        Algorithm algorithm = {MAGIC, num_splits, {}, plan.n > 64 ? MAX_LANES : MAX_LANES / 2, 0};
        std::copy_n(preference.min_alignment_bytes, 4, algorithm.min_alignment_bytes);
        const bool is_new = std::none_of(found.begin(), found.end(),
                                         [&](const Algorithm& other) { return other.num_splits == num_splits; });
        const bool has_room = workspace_bytes(plan, algorithm) <= preference.max_workspace_bytes;
        // Parts of a sum have to be reduced in one of the ways that the caller permits; no bit permits none.
        const bool is_permitted = num_splits == 1 || preference.reduction_scheme_mask != 0;
        const bool fits = has_room && num_splits <= plan.k && is_permitted;
        if (is_new && fits && found.size() < max_algorithms) found.push_back(algorithm);
    }
    return found;
}

}  // namespace stand_in::lt

using namespace stand_in::lt;

API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t operation,
                                                  cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                  cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                  cublasLtMatmulPreference_t preference_handle, int max_results,
                                                  cublasLtMatmulHeuristicResult_t* results, int* num_results) {
    const auto preference = find_preference(preference_handle);
    if (max_results <= 0 || results == nullptr || num_results == nullptr || !preference)
        return CUBLAS_STATUS_INVALID_VALUE;
    *num_results = 0;
    Plan plan;
    if (const cublasStatus_t error = make_plan(operation, a, b, c, d, &plan); error != CUBLAS_STATUS_SUCCESS)
        return error;
    for (const Algorithm& algorithm : find_algorithms(plan, *preference, static_cast<size_t>(max_results))) {
        cublasLtMatmulHeuristicResult_t& result = results[(*num_results)++];
        result = {};
        std::memcpy(&result.algo, &algorithm, sizeof algorithm);
        result.workspace_bytes = workspace_bytes(plan, algorithm);
        result.num_waves = 1.0f;
    }
    return *num_results == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
}

// Whether an algorithm that was found for another shape computes this one.
API cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                                           cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                           const cublasLtMatmulAlgo_t* algo, cublasLtMatmulHeuristicResult_t* result) {
    if (algo == nullptr || result == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    Plan plan;
    if (const cublasStatus_t error = make_plan(operation, a, b, c, d, &plan); error != CUBLAS_STATUS_SUCCESS)
        return error;
    Algorithm algorithm;
    std::memcpy(&algorithm, algo, sizeof algorithm);
    if (algorithm.magic != MAGIC) return CUBLAS_STATUS_INVALID_VALUE;
    if (algorithm.num_splits > plan.k) return CUBLAS_STATUS_NOT_SUPPORTED;
    *result = {};
    result->algo = *algo;
    result->workspace_bytes = workspace_bytes(plan, algorithm);
    result->num_waves = 1.0f;
    return CUBLAS_STATUS_SUCCESS;
}

// Number of parts of an algorithm; the rest of its configuration has no counterpart here.
API cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algo, int number, void* value,
                                                        size_t size, size_t* num_written) {
    Algorithm algorithm;
    if (algo == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(&algorithm, algo, sizeof algorithm);
    if (algorithm.magic != MAGIC) return CUBLAS_STATUS_INVALID_VALUE;
    const uint32_t num_splits = static_cast<uint32_t>(algorithm.num_splits);
    const uint32_t found = number == CUBLASLT_ALGO_CONFIG_SPLITK_NUM ? num_splits : 0;
    if (number != CUBLASLT_ALGO_CONFIG_SPLITK_NUM && number != CUBLASLT_ALGO_CONFIG_ID)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (num_written != nullptr) *num_written = sizeof found;
    if (size < sizeof found || value == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(value, &found, sizeof found);
    return CUBLAS_STATUS_SUCCESS;
}
