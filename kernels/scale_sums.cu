// The scales of a product of FP8 weights with FP8 activations: out[row][i] = sums[row][i] * row_scales[row] *
// scales[i], or that added to out[row][i]. cuBLASLt multiplies the codes; until CUDA 12.9 it knows one scale for a
// whole matrix only.
//
//   sums, out [num_rows][n] f32    row_scales [num_rows] f32    scales [n] f32
//
// `n` is a multiple of 8. If nothing is added, `out` may be `sums`. Grid (num_rows, p), any p: the blocks of a row
// share its vectors of 8 elements. Moves 8 bytes per output (4 read, 4 written), 12 if added; the scales come from the
// L2 cache. No shared memory.
#include "common.cuh"

KERNEL(scale_sums, 1024)
(float* out, const float* sums, const float* __restrict__ row_scales, const float* __restrict__ scales, int n,
 int is_added) {
    const size_t row = blockIdx.x;
    const float row_scale = row_scales[row];
    sums += row * n, out += row * n;
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    for (int i = first * VECTOR; i < n; i += step * VECTOR) {
        float x[VECTOR], s[VECTOR];
        load_8(x, sums + i);
        load_8(s, scales + i);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) x[j] = x[j] * row_scale * s[j];
        if (is_added) {
            float before[VECTOR];
            load_8(before, out + i);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) x[j] += before[j];
        }
        store_8(out + i, x);
    }
}
EXPORT_KERNEL(scale_sums)
