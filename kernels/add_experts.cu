// Adds up what the experts of each row have given, in the order of their ranks, and the shared expert last:
//
//   out[row] = weights[row][0] * sums[places[row][0]] + ... + shared_weights[row] * shared_sums[row],
//   or out[row] += this sum
//
//   sums [num_places][width]    places [num_rows][num_chosen] u32: sort_experts.cu    weights [num_rows][num_chosen]
//   shared_sums [num_rows][width], or null    shared_weights [num_rows]    out [num_rows][width]; all f32 but for places
//   experts [num_rows][num_chosen] u32: rows whose experts are not below num_experts are left as they are
//
// Grid (num_rows, n), any n: the blocks of a row share its vectors of 8 elements. Moves 4 bytes per element of a row
// for each of its experts, and 4 more (8 if added). No shared memory. Not measured yet.
#include "common.cuh"

KERNEL(add_experts, 1024)
(float* __restrict__ out, const float* __restrict__ sums, const u32* __restrict__ places, const float* __restrict__ weights,
 const u32* __restrict__ experts, const float* __restrict__ shared_sums, const float* __restrict__ shared_weights,
 int num_experts, int num_chosen, int width, int is_added) {
    const size_t row = blockIdx.x;
    if (experts[row * num_chosen] >= static_cast<u32>(num_experts)) return;
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    const float shared_weight = shared_sums != nullptr ? shared_weights[row] : 0.0f;
    if (width % VECTOR == 0) {
        for (int i = first * VECTOR; i < width; i += step * VECTOR) {
            float total[VECTOR] = {}, x[VECTOR];
            const auto add = [&](const float* from, float weight) {
                load_8(x, from + i);
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) total[j] += weight * x[j];
            };
            for (int rank = 0; rank < num_chosen; ++rank) {
                const size_t pair = row * num_chosen + rank;
                add(sums + static_cast<size_t>(places[pair]) * width, weights[pair]);
            }
            if (shared_sums != nullptr) add(shared_sums + row * width, shared_weight);
            if (is_added) {
                load_8(x, out + row * width + i);
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) total[j] += x[j];
            }
            store_8(out + row * width + i, total);
        }
    } else {
        for (int i = first; i < width; i += step) {
            float total = 0.0f;
            for (int rank = 0; rank < num_chosen; ++rank) {
                const size_t pair = row * num_chosen + rank;
                total += weights[pair] * sums[static_cast<size_t>(places[pair]) * width + i];
            }
            if (shared_sums != nullptr) total += shared_weight * shared_sums[row * width + i];
            float* const to = out + row * width + i;
            *to = is_added ? *to + total : total;
        }
    }
}
EXPORT_KERNEL(add_experts)
