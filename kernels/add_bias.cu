// out[row] += bias.
//
//   out [num_rows][n] f32    bias [n] f32
//
// Grid (num_rows, m), any m: the blocks of a row share its vectors of 8 elements. Moves 8 bytes per element (4 read,
// 4 written); the bias comes from the L2 cache. No shared memory.
#include "common.cuh"

KERNEL(add_bias, 1024)(float* __restrict__ out, const float* __restrict__ bias, int n) {
    float* const row = out + static_cast<size_t>(blockIdx.x) * n;
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    if (n % VECTOR == 0) {
        for (int i = first * VECTOR; i < n; i += step * VECTOR) {
            float x[VECTOR], b[VECTOR];
            load_8(x, row + i);
            load_8(b, bias + i);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) x[j] += b[j];
            store_8(row + i, x);
        }
    } else {
        for (int i = first; i < n; i += step) row[i] += bias[i];
    }
}
EXPORT_KERNEL(add_bias)
