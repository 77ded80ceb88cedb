// RMS norms of the queries and of the keys of a row, each over all of its heads, in place:
// x = x / sqrt(mean(x^2) + eps) * weight.
//
//   qkv [num_rows][q_width + 2 * k_width] f32: queries, keys, values    q_weight [q_width] f32    k_weight [k_width] f32
//
// Grid (num_rows, 2): a block has the queries or the keys of a row. It reads them twice, from the L1 cache the second time.
// The sum depends on the width and on the number of threads: launch all rows with the same number. Moves 8 bytes per element of
// queries and keys; weights come from the L2 cache. 128 bytes of shared memory. Not measured yet.
#include "common.cuh"

KERNEL(qk_norm, 1024)
(float* __restrict__ qkv, const float* __restrict__ q_weight, const float* __restrict__ k_weight, float eps, int q_width,
 int k_width) {
    SHARED_ARRAY(float, sums, WARP_SIZE);
    const bool is_query = blockIdx.y == 0;
    float* const x = qkv + static_cast<size_t>(blockIdx.x) * (q_width + 2 * k_width) + (is_query ? 0 : q_width);
    const float* const weight = is_query ? q_weight : k_weight;
    const int width = is_query ? q_width : k_width;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf(block_sum(sum, sums) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) x[i] = x[i] * scale * weight[i];
}
EXPORT_KERNEL(qk_norm)
