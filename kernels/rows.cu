// Rows without a norm:
//
//   round_rows       out[row] = x[row], rounded to bf16
//   add_rows         out[row] += x[row]
//   scale_rows       out[row] *= factor
//   add_positions    out[row] += table[positions[row]]: learned positions
//   place_columns    out[row][first + i] = x[row][i], for `out` that begins at column `first` of rows of out_width
//   sum_ranks        out[i] = the sum of parts[rank][i] over up to 16 ranks, in pairs: (0 + 1) + (2 + 3)
//
//   x, out [num_rows][width] f32, out of round_rows bf16    table [num_positions][width] bf16    positions [num_rows]
//   out of place_columns [num_rows][out_width]    parts [num_ranks][part_len], out of sum_ranks [part_len]: grid (1, n)
//
// Grid (num_rows, n), any n: the blocks of a row share its vectors of 8 elements. Moves 6, 12 and 10 bytes per element.
// No shared memory. Not measured yet.
#include "common.cuh"

KERNEL(round_rows, 1024)(bf16* __restrict__ out, const float* __restrict__ x, int width) {
    const size_t row = static_cast<size_t>(blockIdx.x) * width;
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    if (width % VECTOR == 0) {
        for (int i = first * VECTOR; i < width; i += step * VECTOR) {
            float v[VECTOR];
            load_8(v, x + row + i);
            store_8(out + row + i, v);
        }
    } else {
        for (int i = first; i < width; i += step) out[row + i] = to_bf16(x[row + i]);
    }
}
EXPORT_KERNEL(round_rows)

KERNEL(add_rows, 1024)(float* __restrict__ out, const float* __restrict__ x, int width) {
    const size_t row = static_cast<size_t>(blockIdx.x) * width;
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    for (int i = first; i < width; i += step) out[row + i] += x[row + i];
}
EXPORT_KERNEL(add_rows)

KERNEL(scale_rows, 1024)(float* __restrict__ out, float factor, int width) {
    const size_t row = static_cast<size_t>(blockIdx.x) * width;
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    for (int i = first; i < width; i += step) out[row + i] *= factor;
}
EXPORT_KERNEL(scale_rows)

KERNEL(add_positions, 1024)
(float* __restrict__ out, const bf16* __restrict__ table, const u32* __restrict__ positions, int width) {
    float* const to = out + static_cast<size_t>(blockIdx.x) * width;
    const bf16* const from = table + static_cast<size_t>(positions[blockIdx.x]) * width;
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    if (width % VECTOR == 0) {
        for (int i = first * VECTOR; i < width; i += step * VECTOR) {
            float x[VECTOR], sum[VECTOR];
            load_8(x, from + i);
            load_8(sum, to + i);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) sum[j] += x[j];
            store_8(to + i, sum);
        }
    } else {
        for (int i = first; i < width; i += step) to[i] += to_float(from[i]);
    }
}
EXPORT_KERNEL(add_positions)

KERNEL(place_columns, 1024)(float* __restrict__ out, const float* __restrict__ x, int width, int out_width) {
    float* const to = out + static_cast<size_t>(blockIdx.x) * out_width;
    const float* const from = x + static_cast<size_t>(blockIdx.x) * width;
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    for (int i = first; i < width; i += step) to[i] = from[i];
}
EXPORT_KERNEL(place_columns)

KERNEL(sum_ranks, 1024)(float* __restrict__ out, const float* __restrict__ parts, int part_len, int num_ranks) {
    constexpr int MAX_RANKS = 16;
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    for (int i = first; i < part_len; i += step) {
        float sums[MAX_RANKS];
#pragma unroll
        for (int rank = 0; rank < MAX_RANKS; ++rank) {
            // -0 changes no sum.
            sums[rank] = rank < num_ranks ? parts[static_cast<size_t>(rank) * part_len + i] : -0.0f;
        }
#pragma unroll
        for (int distance = 1; distance < MAX_RANKS; distance *= 2) {
#pragma unroll
            for (int rank = 0; rank < MAX_RANKS; rank += 2 * distance) sums[rank] += sums[rank + distance];
        }
        out[i] = sums[0];
    }
}
EXPORT_KERNEL(sum_ranks)
