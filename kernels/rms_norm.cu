// RMS norm (Zhang and Sennrich, arXiv:1910.07467), alone or behind the addition of a residual:
//
//   rms_norm        out[row] = x[row] / sqrt(mean(x[row]^2) + eps) * weight
//   add_rms_norm    hidden[row] += x[row], then the norm of hidden[row]
//
//   x, hidden [num_rows][width] f32    weight [width] f32    out [num_rows][width] bf16
//
// Grid (num_rows): a block has one row, and each thread its vectors of 8 elements, one block's width apart:
//
//   | thread 0 | thread 1 | ... | thread n-1 | thread 0 | ...
//   |<------------- vector 0 -------------->|<- vector 1
//
// The first MAX_KEPT vectors of a thread stay in registers between the sum and the scaling; wider rows are read again,
// from the L1 cache. 256 threads keep 4096 elements, 1024 keep 16384. The sum of a row depends on its width and on the
// number of threads: launch all rows of one width with the same number.
//
// Moves 6 bytes per element (4 read, 2 written), with the addition 14 (8 read, 6 written); weights come from the L2
// cache. 128 bytes of shared memory; at most 64 registers, so that an SM holds 1024 threads.
#include "common.cuh"

namespace {

constexpr int MAX_KEPT = 2;

// Reads the vector of a row at `i`, with a residual its sum with that of `hidden`, which it stores there.
template <bool has_residual>
__device__ __forceinline__ void load_vector(float (&v)[VECTOR], float* hidden, const float* x, int i) {
    load_8(v, x + i);
    if (has_residual) {
        float sum[VECTOR];
        load_8(sum, hidden + i);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) v[j] += sum[j];
        store_8(hidden + i, v);
    }
}

__device__ __forceinline__ float sum_of_squares(const float (&v)[VECTOR]) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) sum += v[j] * v[j];
    return sum;
}

__device__ __forceinline__ void store_scaled(bf16* out, const float (&v)[VECTOR], float scale, const float* weight) {
    float w[VECTOR], y[VECTOR];
    load_8(w, weight);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) y[j] = v[j] * scale * w[j];
    store_8(out, y);
}

template <bool has_residual>
__device__ __forceinline__ void norm(bf16* __restrict__ out, float* __restrict__ hidden, const float* __restrict__ x,
                                     const float* __restrict__ weight, float eps, int width) {
    SHARED_ARRAY(float, sums, WARP_SIZE);
    const size_t at = static_cast<size_t>(blockIdx.x) * width;
    out += at, x += at;
    if (has_residual) hidden += at;
    // Where the row is read again.
    const float* const again = has_residual ? hidden : x;
    float sum = 0.0f;
    if (width % VECTOR == 0) {
        const int first = threadIdx.x * VECTOR, step = blockDim.x * VECTOR;
        float kept[MAX_KEPT][VECTOR];
#pragma unroll
        for (int k = 0; k < MAX_KEPT; ++k) {
            const int i = first + k * step;
            if (i < width) {
                load_vector<has_residual>(kept[k], hidden, x, i);
                sum += sum_of_squares(kept[k]);
            }
        }
        for (int i = first + MAX_KEPT * step; i < width; i += step) {
            float v[VECTOR];
            load_vector<has_residual>(v, hidden, x, i);
            sum += sum_of_squares(v);
        }
        const float scale = 1.0f / sqrtf(block_sum(sum, sums) / width + eps);
#pragma unroll
        for (int k = 0; k < MAX_KEPT; ++k) {
            const int i = first + k * step;
            if (i < width) store_scaled(out + i, kept[k], scale, weight + i);
        }
        for (int i = first + MAX_KEPT * step; i < width; i += step) {
            float v[VECTOR];
            load_8(v, again + i);
            store_scaled(out + i, v, scale, weight + i);
        }
    } else {
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            float v = x[i];
            if (has_residual) hidden[i] = v += hidden[i];
            sum += v * v;
        }
        const float scale = 1.0f / sqrtf(block_sum(sum, sums) / width + eps);
        for (int i = threadIdx.x; i < width; i += blockDim.x) out[i] = to_bf16(again[i] * scale * weight[i]);
    }
}

}  // namespace

KERNEL(rms_norm, 1024)
(bf16* __restrict__ out, const float* __restrict__ x, const float* __restrict__ weight, float eps, int width) {
    norm<false>(out, nullptr, x, weight, eps, width);
}
EXPORT_KERNEL(rms_norm)

KERNEL(add_rms_norm, 1024)
(bf16* __restrict__ out, float* __restrict__ hidden, const float* __restrict__ x, const float* __restrict__ weight,
 float eps, int width) {
    norm<true>(out, hidden, x, weight, eps, width);
}
EXPORT_KERNEL(add_rms_norm)
