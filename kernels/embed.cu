// Token embedding: out[row] = scale * table[token_ids[row]], widened to f32.
//
//   out [num_rows][hidden_size] f32    table [vocab_size][hidden_size] bf16    token_ids [num_rows]    sampled [num_sampled]
//
// embed_part has the rows of the table from that of `first_token` on, `num_tokens` of them; other tokens become -0,
// which changes no sum over ranks.
//
// IN_FLIGHT + i in place of a token is the i-th token that the step before has sampled.
//
// Grid (num_rows, n), any n: the blocks of a row share its vectors of 8 elements. One row of 4096 elements is one
// vector for each of 512 threads. Moves 6 bytes per element: 2 read, 4 written. No shared memory.
#include "common.cuh"

namespace {

__device__ __forceinline__ void embed_row(float* __restrict__ to, const bf16* __restrict__ from, float scale,
                                          int hidden_size) {
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

}  // namespace

KERNEL(embed, 1024)
(float* __restrict__ out, const bf16* __restrict__ table, const u32* __restrict__ token_ids, const u32* __restrict__ sampled,
 float scale, int hidden_size) {
    const size_t row = blockIdx.x;
    const size_t token = token_of(token_ids[row], sampled);
    embed_row(out + row * hidden_size, table + token * hidden_size, scale, hidden_size);
}
EXPORT_KERNEL(embed)

KERNEL(embed_part, 1024)
(float* __restrict__ out, const bf16* __restrict__ table, const u32* __restrict__ token_ids, int first_token, int num_tokens,
 float scale, int hidden_size) {
    const size_t row = blockIdx.x;
    const u32 index = token_ids[row] - static_cast<u32>(first_token);
    float* const to = out + row * hidden_size;
    if (index < static_cast<u32>(num_tokens)) {
        embed_row(to, table + static_cast<size_t>(index) * hidden_size, scale, hidden_size);
    } else {
        const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
        for (int i = first; i < hidden_size; i += step) to[i] = -0.0f;
    }
}
EXPORT_KERNEL(embed_part)
