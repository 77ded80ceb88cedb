// out[i] = rows[indices[i]], for rows of bytes.
//
//   gather_rows      rows of a multiple of 16 bytes, at multiples of 16 bytes
//   gather_rows_4    rows of a multiple of 4 bytes
//
//   out [num_indices][row_len]    rows [...][row_len]    indices [num_indices]
//
// `out` and `rows` do not overlap: blocks run in any order. Grid (num_indices, n), any n: the blocks of a row share its
// units. Reads and writes each byte once. No shared memory.
#include "common.cuh"

namespace {

template <class Unit>
__device__ __forceinline__ void gather(Unit* __restrict__ out, const Unit* __restrict__ rows,
                                       const u32* __restrict__ indices, int row_len) {
    const size_t to = blockIdx.x;
    const size_t from = indices[to];
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    for (int i = first; i < row_len; i += step) out[to * row_len + i] = rows[from * row_len + i];
}

}  // namespace

KERNEL(gather_rows, 1024)
(uint4* __restrict__ out, const uint4* __restrict__ rows, const u32* __restrict__ indices, int row_16_bytes) {
    gather(out, rows, indices, row_16_bytes);
}
EXPORT_KERNEL(gather_rows)

KERNEL(gather_rows_4, 1024)
(u32* __restrict__ out, const u32* __restrict__ rows, const u32* __restrict__ indices, int row_4_bytes) {
    gather(out, rows, indices, row_4_bytes);
}
EXPORT_KERNEL(gather_rows_4)
