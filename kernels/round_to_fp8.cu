// Rows of activations as e4m3 numbers (fp8.cuh), for products of FP8 weights with FP8 activations.
//
//   x [num_rows][width] bf16    codes [num_rows][width] e4m3    scales [num_rows] f32
//
// x = scale * code, rounded: scale = max|x| / 448 of the row, and the codes are x / scale, rounded to even. So a row's codes
// depend on that row alone. A row that is not finite gets the scale NaN, whatever its codes; one whose scale has no
// inverse in f32 becomes 0.
//
// `width` is a multiple of 8. Grid (num_rows): a block has one row, and each thread its vectors of 8 elements, one
// block's width apart. The first MAX_KEPT vectors of a thread stay in registers between the maximum and the rounding;
// wider rows are read again, from the L1 cache. 256 threads keep 8192 elements, 1024 keep 32768. The number of threads
// does not change the bits.
//
// Moves 3 bytes per element (2 read, 1 written). 128 bytes of shared memory; at most 64 registers, so that an SM holds
// 1024 threads.
#include "fp8.cuh"

namespace {

constexpr int MAX_KEPT = 4;

// The largest magnitude of a vector; infinity if an element is not finite, for fmaxf ignores NaN.
__device__ __forceinline__ float largest_of(const uint4& words) {
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float low = fabsf(low_float(pairs[i])), high = fabsf(high_float(pairs[i]));
        largest = fmaxf(largest, low < infinity() ? low : infinity());
        largest = fmaxf(largest, high < infinity() ? high : infinity());
    }
    return largest;
}

__device__ __forceinline__ uint2 codes_of(const uint4& words, float inverse) {
    const auto pair = [&](u32 pair) { return to_e4m3_pair(low_float(pair) * inverse, high_float(pair) * inverse); };
    return make_uint2(pair(words.x) | pair(words.y) << 16, pair(words.z) | pair(words.w) << 16);
}

}  // namespace

KERNEL(round_to_fp8, 1024)
(uint2* __restrict__ codes, float* __restrict__ scales, const uint4* __restrict__ x, int width) {
    SHARED_ARRAY(float, maxima, WARP_SIZE);
    const size_t row = blockIdx.x;
    const int num_vectors = width / VECTOR, first = threadIdx.x, step = blockDim.x;
    x += row * num_vectors, codes += row * num_vectors;
    uint4 kept[MAX_KEPT];
    float largest = 0.0f;
#pragma unroll
    for (int k = 0; k < MAX_KEPT; ++k) {
        const int i = first + k * step;
        if (i < num_vectors) {
            kept[k] = x[i];
            largest = fmaxf(largest, largest_of(kept[k]));
        }
    }
    for (int i = first + MAX_KEPT * step; i < num_vectors; i += step) largest = fmaxf(largest, largest_of(x[i]));
    largest = block_max(largest, maxima);
    float scale = largest / MAX_E4M3, inverse = 1.0f / scale;
    if (largest == infinity()) {
        scale = __uint_as_float(0x7fc00000u), inverse = 0.0f;
    } else if (scale <= 1.17549435e-38f) {
        // The least normal number: below it the inverse may be infinite.
        scale = 0.0f, inverse = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < MAX_KEPT; ++k) {
        const int i = first + k * step;
        if (i < num_vectors) codes[i] = codes_of(kept[k], inverse);
    }
    for (int i = first + MAX_KEPT * step; i < num_vectors; i += step) codes[i] = codes_of(x[i], inverse);
    if (threadIdx.x == 0) scales[row] = scale;
}
EXPORT_KERNEL(round_to_fp8)
