// Token embedding: out[row] = scale * table[token_ids[row]], widened to f32.
//
//   out [num_rows][hidden_size] f32    table [vocab_size][hidden_size] bf16    token_ids [num_rows]    sampled [num_sampled]
//
// IN_FLIGHT + i in place of a token is the i-th token that the step before has sampled.
//
// Grid (num_rows, n), any n: the blocks of a row share its vectors of 8 elements. One row of 4096 elements is one vector
// for each of 512 threads. Moves 6 bytes per element: 2 read, 4 written. No shared memory.
#include "common.cuh"

KERNEL(embed, 1024)
(float* __restrict__ out, const bf16* __restrict__ table, const u32* __restrict__ token_ids, const u32* __restrict__ sampled,
 float scale, int hidden_size) {
    const size_t row = blockIdx.x;
    const size_t token = token_of(token_ids[row], sampled);
    const bf16* const from = table + token * hidden_size;
    float* const to = out + row * hidden_size;
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    if (hidden_size % VECTOR == 0) {
        for (int i = first * VECTOR; i < hidden_size; i += step * VECTOR) {
            float x[VECTOR];
            load_8(x, from + i);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) x[j] *= scale;
            store_8(to + i, x);
        }
    } else {
        for (int i = first; i < hidden_size; i += step) to[i] = to_float(from[i]) * scale;
    }
}
EXPORT_KERNEL(embed)
