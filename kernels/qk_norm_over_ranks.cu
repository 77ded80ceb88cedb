// RMS norms of queries and keys over all heads of a model whose heads are on several GPUs. Between the two kernels the
// squares are summed over the GPUs:
//
//   qk_squares         squares[row][head] = sum(x^2) of a head of this GPU; -0, which changes no sum, for the heads of others
//   qk_norm_of_squares x = x / sqrt(mean(x^2 of all heads) + eps) * weight, in place
//
//   qkv [num_rows][(own_q + 2 * own_k) * head_dim] f32: queries, keys, values of this GPU    squares [num_rows][num_q + num_k] f32
//   q_weight [own_q * head_dim] f32    k_weight [own_k * head_dim] f32: for the heads of this GPU
//
// This GPU has the consecutive query heads from first_q on, and for each group of own_q / own_k of these their key
// head. The square of a key is that of the GPU that has the first of its queries, as another one may have it too.
//
// qk_squares: grid (num_rows, n), any n that gives each head of the model a warp. Its sum depends on head_dim alone.
// qk_norm_of_squares: grid (num_rows, 2), a block has the queries or the keys of a row. Its sum depends on the number
// of heads of the model and on the number of threads: launch it with the same number on all GPUs. 128 bytes of shared
// memory. Together they move 12 bytes per element of queries and keys. Not measured yet.
#include "common.cuh"

KERNEL(qk_squares, 1024)
(float* __restrict__ squares, const float* __restrict__ qkv, int num_q, int num_k, int first_q, int own_q, int own_k,
 int head_dim) {
    const int num_warps = blockDim.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const float* const row = qkv + static_cast<size_t>(blockIdx.x) * (own_q + 2 * own_k) * head_dim;
    for (int head = blockIdx.y * num_warps + threadIdx.x / WARP_SIZE; head < num_q + num_k; head += gridDim.y * num_warps) {
        const bool is_query = head < num_q;
        const int query = (is_query ? head : (head - num_q) * (num_q / num_k)) - first_q;
        float sum = -0.0f;
        if (query >= 0 && query < own_q) {
            const float* const x = row + (is_query ? query : own_q + query / (own_q / own_k)) * head_dim;
            float part = 0.0f;
            for (int i = lane; i < head_dim; i += WARP_SIZE) part += x[i] * x[i];
            sum = warp_sum(part);
        }
        if (lane == 0) squares[static_cast<size_t>(blockIdx.x) * (num_q + num_k) + head] = sum;
    }
}
EXPORT_KERNEL(qk_squares)

KERNEL(qk_norm_of_squares, 1024)
(float* __restrict__ qkv, const float* __restrict__ squares, const float* __restrict__ q_weight,
 const float* __restrict__ k_weight, float eps, int num_q, int num_k, int own_q, int own_k, int head_dim) {
    SHARED_ARRAY(float, sums, WARP_SIZE);
    const bool is_query = blockIdx.y == 0;
    const int num_heads = is_query ? num_q : num_k, width = (is_query ? own_q : own_k) * head_dim;
    const float* const of_heads = squares + static_cast<size_t>(blockIdx.x) * (num_q + num_k) + (is_query ? 0 : num_q);
    float* const x = qkv + (static_cast<size_t>(blockIdx.x) * (own_q + 2 * own_k) + (is_query ? 0 : own_q)) * head_dim;
    const float* const weight = is_query ? q_weight : k_weight;
    float sum = 0.0f;
    for (int head = threadIdx.x; head < num_heads; head += blockDim.x) sum += of_heads[head];
    const float scale = 1.0f / sqrtf(block_sum(sum, sums) / (num_heads * head_dim) + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) x[i] = x[i] * scale * weight[i];
}
EXPORT_KERNEL(qk_norm_of_squares)
