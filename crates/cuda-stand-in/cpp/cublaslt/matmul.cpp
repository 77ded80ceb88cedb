// Multiplications as plain loops, with sums in f32.
#include <algorithm>
#include <vector>

#include "../shared.h"
#include "numbers.h"
#include "plan.h"

namespace stand_in::lt {
namespace {

// Work of one call. It has two parts if the sum is split: they meet in the workspace, so that two streams with one
// workspace spoil each other's results, as on a GPU.
struct Matmul {
    Plan plan;
    Algorithm algorithm;
    float alpha, beta;

    // Operands in the order of ranges(); null for those that it does not have.
    struct Operands {
        const void *a, *b, *c;
        void* d;
        const void* bias;
        const float *a_scale, *b_scale;
        float* workspace;
    };

    void sum_parts(const Operands& operands) const;
    void finish(const Operands& operands) const;

    size_t part_at(size_t batch, size_t split, size_t row, size_t col) const {
        return ((batch * algorithm.num_splits + split) * plan.n + col) * plan.m + row;
    }
};

const void* offset(const void* elements, cudaDataType_t type, size_t num_elements) {
    return static_cast<const char*>(elements) + num_elements * bytes_of(type);
}

// Sums run in lanes, for the compiler to vectorise; they are added in order at the end.
template <size_t num_lanes>
float dot(const float* x, const float* y, size_t len) {
    float lanes[num_lanes] = {};
    size_t i = 0;
    for (; i + num_lanes <= len; i += num_lanes) {
        for (size_t lane = 0; lane < num_lanes; ++lane) lanes[lane] += x[i + lane] * y[i + lane];
    }
    for (size_t lane = 0; i < len; ++i, ++lane) lanes[lane] += x[i] * y[i];
    float sum = 0.0f;
    for (const float lane : lanes) sum += lane;
    return sum;
}

// Without a split, the sums go to where the caller wants them: workspace stands for any array of the same order.
void Matmul::sum_parts(const Operands& operands) const {
    const size_t part_len = (plan.k + algorithm.num_splits - 1) / algorithm.num_splits;
    std::vector<float> columns(plan.n * plan.k), row(plan.k);
    for (size_t batch = 0; batch < static_cast<size_t>(plan.d.batch_count); ++batch) {
        const void* a = offset(operands.a, plan.a.type, batch * static_cast<size_t>(plan.a.batch_stride));
        const void* b = offset(operands.b, plan.b.type, batch * static_cast<size_t>(plan.b.batch_stride));
        const bool is_b_plain = plan.operation.op_b == CUBLAS_OP_N;
        for (size_t col = 0; col < plan.n; ++col) {
            const size_t first = is_b_plain ? plan.b.at(0, col) : plan.b.at(col, 0);
            const size_t step = is_b_plain ? plan.b.at(1, 0) : plan.b.at(0, 1);
            load_all(plan.b.type, b, first, step, plan.k, &columns[col * plan.k]);
        }
        const bool is_a_plain = plan.operation.op_a == CUBLAS_OP_N;
        for (size_t m = 0; m < plan.m; ++m) {
            const size_t first = is_a_plain ? plan.a.at(m, 0) : plan.a.at(0, m);
            const size_t step = is_a_plain ? plan.a.at(0, 1) : plan.a.at(1, 0);
            load_all(plan.a.type, a, first, step, plan.k, row.data());
            for (size_t split = 0; split < algorithm.num_splits; ++split) {
                const size_t begin = std::min(split * part_len, plan.k), end = std::min(begin + part_len, plan.k);
                const auto sum = algorithm.num_lanes == MAX_LANES ? dot<MAX_LANES> : dot<MAX_LANES / 2>;
                for (size_t col = 0; col < plan.n; ++col) {
                    operands.workspace[part_at(batch, split, m, col)] =
                        sum(&row[begin], &columns[col * plan.k + begin], end - begin);
                }
            }
        }
    }
}

void Matmul::finish(const Operands& operands) const {
    const float scale =
        alpha * (operands.a_scale ? *operands.a_scale : 1.0f) * (operands.b_scale ? *operands.b_scale : 1.0f);
    const cudaDataType_t bias_type =
        plan.operation.bias_type == TYPE_OF_OUTPUT ? plan.d.type : plan.operation.bias_type;
    for (size_t batch = 0; batch < static_cast<size_t>(plan.d.batch_count); ++batch) {
        const void* c = offset(operands.c, plan.c.type, batch * static_cast<size_t>(plan.c.batch_stride));
        const size_t first = batch * static_cast<size_t>(plan.d.batch_stride);
        for (size_t col = 0; col < plan.n; ++col) {
            for (size_t row = 0; row < plan.m; ++row) {
                float sum = 0.0f;
                for (size_t split = 0; split < algorithm.num_splits; ++split) {
                    sum += operands.workspace[part_at(batch, split, row, col)];
                }
                float value = scale * sum;
                if (beta != 0.0f) value += beta * load(plan.c.type, c, plan.c.at(row, col));
                if (operands.bias != nullptr) {
                    const size_t stride = static_cast<size_t>(plan.operation.bias_batch_stride);
                    value += load(bias_type, operands.bias, batch * stride + row);
                }
                store(plan.d.type, operands.d, first + plan.d.at(row, col), value);
            }
        }
    }
}

size_t num_bytes(const Layout& layout) {
    const size_t last = layout.at(layout.rows - 1, layout.cols - 1);
    const size_t batches = static_cast<size_t>(layout.batch_count - 1) * static_cast<size_t>(layout.batch_stride);
    return (batches + last + 1) * bytes_of(layout.type);
}

// The call's operands as ranges of memory, and what each of them is.
struct Ranges {
    std::vector<CuStandInOperand> ranges;
    std::vector<const void * Matmul::Operands::*> inputs;

    void add(const void* Matmul::Operands::*which, CUdeviceptr address, size_t size) {
        ranges.push_back({address, size});
        inputs.push_back(which);
    }
};

// A part of the work, as the driver's stand-in keeps it.
struct Part {
    std::shared_ptr<const Matmul> matmul;
    std::vector<const void * Matmul::Operands::*> inputs;
    bool sums, finishes;
};

Matmul::Operands operands_of(const Part& part, void* const* addresses) {
    Matmul::Operands operands = {};
    const size_t num_inputs = part.inputs.size();
    for (size_t i = 0; i < num_inputs; ++i) operands.*part.inputs[i] = addresses[i];
    size_t next = num_inputs;
    operands.d = addresses[next++];
    const Operation& operation = part.matmul->plan.operation;
    if (operation.a_scale != 0) operands.a_scale = static_cast<const float*>(addresses[next++]);
    if (operation.b_scale != 0) operands.b_scale = static_cast<const float*>(addresses[next++]);
    if (part.matmul->algorithm.num_splits > 1) operands.workspace = static_cast<float*>(addresses[next++]);
    return operands;
}

bool run_part(void* state, void* const* addresses) {
    const Part& part = *static_cast<const Part*>(state);
    const Plan& plan = part.matmul->plan;
    Matmul::Operands operands = operands_of(part, addresses);
    std::vector<float> sums;
    if (operands.workspace == nullptr) {
        sums.resize(plan.m * plan.n * static_cast<size_t>(plan.d.batch_count));
        operands.workspace = sums.data();
    }
    if (part.sums) part.matmul->sum_parts(operands);
    if (part.finishes) part.matmul->finish(operands);
    return true;
}

void drop_part(void* state) { delete static_cast<Part*>(state); }

cublasStatus_t check_alignment(const Algorithm& algorithm, const CUdeviceptr (&addresses)[4]) {
    for (size_t i = 0; i < 4; ++i) {
        const uint64_t alignment = algorithm.min_alignment_bytes[i];
        if (alignment == 0 || addresses[i] % alignment == 0) continue;
        return refuse(
            CUBLAS_STATUS_INVALID_VALUE,
            "matrix %c at %#llx: the algorithm was found for addresses of %llu bytes (MIN_ALIGNMENT_%c_BYTES)",
            "ABCD"[i], addresses[i], static_cast<unsigned long long>(alignment), "ABCD"[i]);
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t enqueue(CUstream stream, const Ranges& ranges, Part part) {
    const CUresult result = cuStandInEnqueue(stream, "cublasLtMatmul", ranges.ranges.data(), ranges.ranges.size(),
                                             run_part, drop_part, new Part(std::move(part)));
    if (result == CUDA_SUCCESS) return CUBLAS_STATUS_SUCCESS;
    return result == CUDA_ERROR_INVALID_VALUE ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // namespace
}  // namespace stand_in::lt

using namespace stand_in::lt;

API cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha,
                                  CUdeviceptr a, cublasLtMatrixLayout_t layout_a, CUdeviceptr b,
                                  cublasLtMatrixLayout_t layout_b, const void* beta, CUdeviceptr c,
                                  cublasLtMatrixLayout_t layout_c, CUdeviceptr d, cublasLtMatrixLayout_t layout_d,
                                  const cublasLtMatmulAlgo_t* algo, CUdeviceptr workspace, size_t workspace_size,
                                  CUstream stream) {
    {
        std::lock_guard lock(library().mutex);
        if (library().handles.find(handle) == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    }
    if (alpha == nullptr || beta == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    auto matmul = std::make_shared<Matmul>();
    matmul->alpha = *static_cast<const float*>(alpha);
    matmul->beta = *static_cast<const float*>(beta);
    Plan& plan = matmul->plan;
    cublasStatus_t status = make_plan(operation, layout_a, layout_b, layout_c, layout_d, &plan);
    if (status != CUBLAS_STATUS_SUCCESS) return status;

    // Without an algorithm, the library chooses one for the addresses at hand.
    Preference preference;
    preference.max_workspace_bytes = workspace_size;
    std::fill_n(preference.min_alignment_bytes, 4, 0);
    if (algo == nullptr) matmul->algorithm = find_algorithms(plan, preference, 1).at(0);
    if (algo != nullptr) std::memcpy(&matmul->algorithm, algo, sizeof *algo);
    const Algorithm& algorithm = matmul->algorithm;
    if (algorithm.magic != MAGIC)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "no heuristic has returned this algorithm");
    const CUdeviceptr of_c = matmul->beta == 0.0f ? d : c;
    status = check_alignment(algorithm, {a, b, of_c, d});
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const size_t needed = workspace_bytes(plan, algorithm);
    if (needed > workspace_size) {
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "a workspace of %zu bytes, %zu are needed", workspace_size, needed);
    }

    Ranges ranges;
    ranges.add(&Matmul::Operands::a, a, num_bytes(plan.a));
    ranges.add(&Matmul::Operands::b, b, num_bytes(plan.b));
    if (matmul->beta != 0.0f) ranges.add(&Matmul::Operands::c, c, num_bytes(plan.c));
    if (plan.operation.epilogue == CUBLASLT_EPILOGUE_BIAS) {
        const cudaDataType_t type = plan.operation.bias_type == TYPE_OF_OUTPUT ? plan.d.type : plan.operation.bias_type;
        const size_t batches =
            static_cast<size_t>(plan.d.batch_count - 1) * static_cast<size_t>(plan.operation.bias_batch_stride);
        ranges.add(&Matmul::Operands::bias, plan.operation.bias, (batches + plan.m) * bytes_of(type));
    }
    const auto inputs = ranges.inputs;
    ranges.ranges.push_back({d, num_bytes(plan.d)});
    if (plan.operation.a_scale != 0) ranges.ranges.push_back({plan.operation.a_scale, sizeof(float)});
    if (plan.operation.b_scale != 0) ranges.ranges.push_back({plan.operation.b_scale, sizeof(float)});
    if (algorithm.num_splits == 1) return enqueue(stream, ranges, {matmul, inputs, true, true});
    ranges.ranges.push_back({workspace, needed});
    status = enqueue(stream, ranges, {matmul, inputs, true, false});
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    return enqueue(stream, ranges, {matmul, inputs, false, true});
}
