// Adds up the partial sums of quantised_gemm.cu: out[row] = partials[0][row] + partials[1][row] + ... + bias, or that
// added to out[row].
//
//   partials [num_splits][m][n] f32    bias [n] f32, or null    out [m][n] f32
//
// Grid (m, p), any p: the blocks of a row share its elements. Moves 4 bytes per partial sum, which the L2 cache
// still has, and 4 per output (8 if added). No shared memory.
#include "common.cuh"

KERNEL(sum_splits, 1024)
(float* __restrict__ out, const float* __restrict__ partials, const float* __restrict__ bias, int num_splits, int n,
 int is_added) {
    const size_t row = blockIdx.x, split_len = static_cast<size_t>(gridDim.x) * n;
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    for (int i = first; i < n; i += step) {
        const size_t at = row * n + i;
        float sum = partials[at];
        for (int split = 1; split < num_splits; ++split) sum += partials[split * split_len + at];
        if (bias != nullptr) sum += bias[i];
        out[at] = is_added ? out[at] + sum : sum;
    }
}
EXPORT_KERNEL(sum_splits)
