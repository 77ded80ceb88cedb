// out[row][i] = x[row][columns[i]]: activations in the order in which a quantised matrix has its columns (GPTQ's act
// order).
//
//   x, out [num_rows][width] bf16    columns [width] u32, a permutation
//
// `out` and `x` do not overlap. Grid (num_rows, n), any n: the blocks of a row share its elements. Moves 4 bytes per
// element, and reads columns from the L2 cache; reads of x are scattered within a row, which the L1 cache holds. No
// shared memory.
#include "common.cuh"

KERNEL(gather_columns, 1024)
(bf16* __restrict__ out, const bf16* __restrict__ x, const u32* __restrict__ columns, int width) {
    const size_t row = static_cast<size_t>(blockIdx.x) * width;
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    for (int i = first; i < width; i += step) out[row + i] = x[row + columns[i]];
}
EXPORT_KERNEL(gather_columns)
