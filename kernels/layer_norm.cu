// Layer norm (Ba, Kiros, Hinton, arXiv:1607.06450), and norms whose result is added:
//
//   layer_norm          out[row] = (x[row] - mean) / sqrt(variance + eps) * weight + bias
//   replace_layer_normed    hidden[row] = that, of hidden[row] itself
//   add_layer_normed    hidden[row] += that
//   add_rms_normed      hidden[row] += x[row] / sqrt(mean(x[row]^2) + eps) * weight
//
//   x, hidden [num_rows][width] f32    weight [width] f32    bias [width] f32, or null    out [num_rows][width] bf16
//
// Grid (num_rows): a block has one row, and each thread its vectors of 8 elements, one block's width apart, as in
// rms_norm.cu. The mean comes first and the variance from the differences to it, so that nothing cancels; the row is
// read three times, from the L1 cache after the first. The sums of a row depend on its width and on the number of
// threads: launch all rows of one width with the same number.
//
// Moves 6 bytes per element (4 read, 2 written), replaced ones 8, added ones 12 (8 read, 4 written); weights come from
// the L2 cache. 256 bytes of shared memory. Not measured yet.
#include "common.cuh"

namespace {

// The sum of a function of all elements of a row, in each thread.
template <class Term>
__device__ __forceinline__ float row_sum(const float* x, int width, float* scratch, Term term) {
    float sum = 0.0f;
    if (width % VECTOR == 0) {
        for (int i = threadIdx.x * VECTOR; i < width; i += blockDim.x * VECTOR) {
            float v[VECTOR];
            load_8(v, x + i);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) sum += term(v[j]);
        }
    } else {
        for (int i = threadIdx.x; i < width; i += blockDim.x) sum += term(x[i]);
    }
    return block_sum(sum, scratch);
}

template <bool ADDS>
__device__ __forceinline__ void write(bf16* to, const float (&y)[VECTOR]) {
    store_8(to, y);
}

template <bool ADDS>
__device__ __forceinline__ void write(float* to, const float (&y)[VECTOR]) {
    float sum[VECTOR] = {};
    if constexpr (ADDS) load_8(sum, to);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) sum[j] = ADDS ? sum[j] + y[j] : y[j];
    store_8(to, sum);
}

template <bool ADDS>
__device__ __forceinline__ void write(bf16* to, float y) {
    *to = to_bf16(y);
}

template <bool ADDS>
__device__ __forceinline__ void write(float* to, float y) {
    *to = ADDS ? *to + y : y;
}

// `out` may be `x`: each thread has read its elements when it writes them.
template <bool ADDS, class Out>
__device__ __forceinline__ void write_row(Out* out, const float* x, float mean, float scale, const float* weight,
                                          const float* bias, int width) {
    if (width % VECTOR == 0) {
        for (int i = threadIdx.x * VECTOR; i < width; i += blockDim.x * VECTOR) {
            float v[VECTOR], w[VECTOR], b[VECTOR] = {};
            load_8(v, x + i);
            load_8(w, weight + i);
            if (bias != nullptr) load_8(b, bias + i);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) v[j] = (v[j] - mean) * scale * w[j] + b[j];
            write<ADDS>(out + i, v);
        }
    } else {
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            write<ADDS>(out + i, (x[i] - mean) * scale * weight[i] + (bias != nullptr ? bias[i] : 0.0f));
        }
    }
}

template <bool ADDS, class Out>
__device__ __forceinline__ void layer_norm_row(Out* out, const float* x, const float* weight, const float* bias, float eps,
                                               int width) {
    SHARED_ARRAY(float, sums, WARP_SIZE);
    SHARED_ARRAY(float, squares, WARP_SIZE);
    const size_t at = static_cast<size_t>(blockIdx.x) * width;
    const float mean = row_sum(x + at, width, sums, [](float v) { return v; }) / width;
    const auto square = [mean](float v) { return (v - mean) * (v - mean); };
    const float variance = row_sum(x + at, width, squares, square) / width;
    write_row<ADDS>(out + at, x + at, mean, 1.0f / sqrtf(variance + eps), weight, bias, width);
}

}  // namespace

KERNEL(layer_norm, 1024)
(bf16* __restrict__ out, const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
 float eps, int width) {
    layer_norm_row<false>(out, x, weight, bias, eps, width);
}
EXPORT_KERNEL(layer_norm)

KERNEL(add_layer_normed, 1024)
(float* __restrict__ hidden, const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
 float eps, int width) {
    layer_norm_row<true>(hidden, x, weight, bias, eps, width);
}
EXPORT_KERNEL(add_layer_normed)

KERNEL(replace_layer_normed, 1024)
(float* hidden, const float* __restrict__ weight, const float* __restrict__ bias, float eps, int width) {
    layer_norm_row<false>(hidden, hidden, weight, bias, eps, width);
}
EXPORT_KERNEL(replace_layer_normed)

KERNEL(add_rms_normed, 1024)
(float* __restrict__ hidden, const float* __restrict__ x, const float* __restrict__ weight, float eps, int width) {
    SHARED_ARRAY(float, sums, WARP_SIZE);
    const size_t at = static_cast<size_t>(blockIdx.x) * width;
    const float mean = row_sum(x + at, width, sums, [](float v) { return v * v; }) / width;
    write_row<true>(hidden + at, x + at, 0.0f, 1.0f / sqrtf(mean + eps), weight, nullptr, width);
}
EXPORT_KERNEL(add_rms_normed)
