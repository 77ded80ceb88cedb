// A multiplication that has been checked: its shape, and the algorithm that computes it.
#pragma once
#include <vector>

#include "objects.h"

namespace stand_in::lt {

struct Plan {
    Operation operation;
    Layout a, b, c, d;
    size_t m, n, k;  // D is m x n, op(A) m x k, op(B) k x n
};

// An algorithm splits the sum over k into parts, sums each in lanes, and adds lanes and parts. So algorithms round
// differently, like those of the real library, of which also those without splits differ in the order of their sums.
struct Algorithm {
    uint64_t magic;
    uint64_t num_splits;
    uint64_t min_alignment_bytes[4];  // of A, B, C, D
    uint64_t num_lanes;               // up to MAX_LANES
    uint64_t unused;
};
static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t));

inline constexpr uint64_t MAX_LANES = 16;

inline constexpr uint64_t MAGIC = 0x74657362746f6e;

// CUBLAS_STATUS_INVALID_VALUE for what is never right, CUBLAS_STATUS_NOT_SUPPORTED for what this library cannot
// compute.
cublasStatus_t make_plan(cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                         cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, Plan* plan);

size_t workspace_bytes(const Plan& plan, const Algorithm& algorithm);

// The algorithms for a multiplication, the preferred one first. At most max_algorithms.
std::vector<Algorithm> find_algorithms(const Plan& plan, const Preference& preference, size_t max_algorithms);

}  // namespace stand_in::lt
