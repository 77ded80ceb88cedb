// Gates and norms of layers with recurrent states, and of attention.
//
//   gate_results       out = norm(results * silu(gates)), or norm(results) * silu(gates), or without a norm, or
//                      norm(results) * sigmoid(gates): an RMS norm over each group of a row
//   scale_inputs       multiplies the parts of a state space's row with factors of their own
//   gate_attention     attended *= sigmoid(gates), or softplus(gates); a gate is for run_len elements
//
//   x [num_rows][input_len] f32, with results of `width` elements    norm [norm_len] f32, repeated over a row
//   all_gates [num_rows][gates_len] f32, with gates of `width` elements from first_gate on: x, or rows of their own
//   out, attended [num_rows][width] bf16    gates [num_rows][width / run_len] f32
//
// gate_results: grid (num_rows, width / group_len), a block has a group. The others: grid (num_rows, n), any n. Moves
// 10 bytes an element; 128 bytes of shared memory.
#include "activations.cuh"

namespace {

// Where the norm is: SpaceNorm of crates/device. SIGMOID is UNGATED with the other function of gates.
enum Order { GATED = 0, UNGATED = 1, ABSENT = 2, SIGMOID = 3 };

}  // namespace

KERNEL(gate_results, 256)
(bf16* __restrict__ out, const float* __restrict__ x, const float* __restrict__ all_gates,
 const float* __restrict__ norm, int input_len, int gates_len, int width, int first_result, int first_gate,
 int group_len, int norm_len, int order, float eps) {
    SHARED_ARRAY(float, sums, WARP_SIZE);
    const float* const row = x + static_cast<size_t>(blockIdx.x) * input_len;
    const int first = blockIdx.y * group_len;
    const float* const results = row + first_result + first;
    const float* const gates = all_gates + static_cast<size_t>(blockIdx.x) * gates_len + first_gate + first;
    const bool is_before = order == GATED || order == ABSENT;
    bf16* const to = out + static_cast<size_t>(blockIdx.x) * width + first;
    const auto in_norm = [&](int i) { return is_before ? results[i] * Silu::of(gates[i]) : results[i]; };
    if (order == ABSENT) {
        for (int i = threadIdx.x; i < group_len; i += blockDim.x) to[i] = to_bf16(in_norm(i));
        return;
    }
    float sum = 0.0f;
    for (int i = threadIdx.x; i < group_len; i += blockDim.x) {
        const float value = in_norm(i);
        sum += value * value;
    }
    const float scale = 1.0f / sqrtf(block_sum(sum, sums) / group_len + eps);
    for (int i = threadIdx.x; i < group_len; i += blockDim.x) {
        const float normed = in_norm(i) * scale * norm[(first + i) % norm_len];
        const float gated = order == SIGMOID   ? normed / (1.0f + __expf(-gates[i]))
                            : order == UNGATED ? normed * Silu::of(gates[i])
                                               : normed;
        to[i] = to_bf16(gated);
    }
}
EXPORT_KERNEL(gate_results)

KERNEL(scale_inputs, 256)
(float* __restrict__ x, int value_len, int key_len, int num_heads, float of_values, float of_keys, float of_queries,
 float of_gates, float of_times) {
    const int input_len = 2 * (value_len + key_len) + num_heads;
    float* const row = x + static_cast<size_t>(blockIdx.x) * input_len;
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < input_len; i += gridDim.y * blockDim.x) {
        const int behind_keys = value_len + 2 * key_len;
        row[i] *= i < value_len                 ? of_values
                  : i < value_len + key_len     ? of_keys
                  : i < behind_keys             ? of_queries
                  : i < behind_keys + value_len ? of_gates
                                                : of_times;
    }
}
EXPORT_KERNEL(scale_inputs)

KERNEL(gate_attention, 256)
(bf16* __restrict__ attended, const float* __restrict__ gates, int width, int run_len, int has_softplus) {
    const size_t at = static_cast<size_t>(blockIdx.x) * width;
    const float* const of_row = gates + static_cast<size_t>(blockIdx.x) * (width / run_len);
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
        const float gate = of_row[i / run_len];
        const float factor = has_softplus ? (gate > 20.0f ? gate : log1pf(expf(gate))) : 1.0f / (1.0f + __expf(-gate));
        attended[at + i] = to_bf16(to_float(attended[at + i]) * factor);
    }
}
EXPORT_KERNEL(gate_attention)
