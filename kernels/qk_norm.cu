// Norms of the queries and of the keys of a row, in place:
//
//   qk_norm        x = x / sqrt(mean(x^2) + eps) * weight, over all query heads, and over all key heads
//   qk_layer_norm  x = (x - mean) / sqrt(variance + eps) * weight, of each head by itself
//
//   qkv [num_rows][q_width + 2 * k_width] f32: queries, keys, values    q_weight [q_width] f32    k_weight [k_width] f32
//   A width is that of all heads, num_q_heads * head_dim or num_k_heads * head_dim.
//
// qk_norm: grid (num_rows, 2), a block has the queries or the keys of a row. It reads them twice, from the L1 cache the
// second time. The sum depends on the width and on the number of threads: launch all rows with the same number. 128
// bytes of shared memory. qk_layer_norm: grid (num_rows, n), any n that gives each head a warp at some time. A warp
// reads its head three times, from the L1 cache after the first: the variance comes from the differences to the mean,
// so that nothing cancels. Its sums depend on head_dim alone. No shared memory.
//
// Both move 8 bytes per element of queries and keys; weights come from the L2 cache. Not measured yet.
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

KERNEL(qk_layer_norm, 1024)
(float* __restrict__ qkv, const float* __restrict__ q_weight, const float* __restrict__ k_weight, float eps, int num_q_heads,
 int num_k_heads, int head_dim) {
    const int num_warps = blockDim.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, num_heads = num_q_heads + num_k_heads;
    float* const row = qkv + static_cast<size_t>(blockIdx.x) * (num_heads + num_k_heads) * head_dim;
    for (int head = blockIdx.y * num_warps + threadIdx.x / WARP_SIZE; head < num_heads; head += gridDim.y * num_warps) {
        float* const x = row + head * head_dim;
        const float* const weight =
            head < num_q_heads ? q_weight + head * head_dim : k_weight + (head - num_q_heads) * head_dim;
        float sum = 0.0f, squares = 0.0f;
        for (int i = lane; i < head_dim; i += WARP_SIZE) sum += x[i];
        const float mean = warp_sum(sum) / head_dim;
        for (int i = lane; i < head_dim; i += WARP_SIZE) squares += (x[i] - mean) * (x[i] - mean);
        const float scale = 1.0f / sqrtf(warp_sum(squares) / head_dim + eps);
        for (int i = lane; i < head_dim; i += WARP_SIZE) x[i] = (x[i] - mean) * scale * weight[i];
    }
}
EXPORT_KERNEL(qk_layer_norm)
