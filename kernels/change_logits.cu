// Changes of logits before a token is chosen: biases, forbidden tokens, and penalties of tokens that have occurred,
// with the order and the roundings of crates/sampling/src/processors.rs.
//
//   logits [num_rows][vocab_size] f32, changed in place    rows [num_rows]    words: the lists of all rows
//   counts [gridDim.x][vocab_size] u32: 0 before and afterwards
//
//   lists of a row   | num_biases x (token, f32) | num_forbidden tokens | num_ignored tokens | num_counted tokens |
//
// Ignored tokens get the repetition penalty, counted ones all penalties, as often as they occur. No two biases have the
// same token; all other lists may repeat tokens. A logit that is not finite stays as it is, and none becomes so, unless
// it is forbidden.
//
// Tokens are counted in memory, where each is found again by its first visitor of a second pass, who clears its count:
// so the cost is that of the lists, whatever the vocabulary is. A row with 4096 tokens takes 512 threads 8 rounds of
// two atomics in the L2 cache: 10 us at most. Blocks take turns with rows, so that counts need not be larger than a few
// rows. Grid (any number of blocks); no shared memory. Not measured yet.
#include "sampling.cuh"

namespace {

constexpr float LARGEST = 3.402823466e+38f;

__device__ __forceinline__ bool is_finite(float x) { return x >= -LARGEST && x <= LARGEST; }

// fminf and fmaxf would make a number of NaN, which cannot be here.
__device__ __forceinline__ float saturated(float x) { return fminf(fmaxf(x, -LARGEST), LARGEST); }

__device__ __forceinline__ float penalised(float logit, const SamplingRow& row, u32 count) {
    const float penalty = row.repetition_penalty;
    const float repeated = logit > 0.0f ? __fdiv_rn(logit, penalty) : __fmul_rn(logit, penalty);
    const float frequency = __fmul_rn(row.frequency_penalty, static_cast<float>(count));
    const float presence = count > 0 ? row.presence_penalty : 0.0f;
    return saturated(__fsub_rn(__fsub_rn(repeated, frequency), presence));
}

}  // namespace

KERNEL(change_logits, 512)
(float* __restrict__ all_logits, u32* __restrict__ all_counts, const SamplingRow* __restrict__ rows,
 const u32* __restrict__ words, int num_rows, int vocab_size) {
    // A counted token adds 2; an ignored one sets the lowest bit.
    u32* const counts = all_counts + static_cast<size_t>(blockIdx.x) * vocab_size;
    const u32 first = threadIdx.x, step = blockDim.x, num_ids = vocab_size;
    for (int index = blockIdx.x; index < num_rows; index += gridDim.x) {
        const SamplingRow row = rows[index];
        const u32 num_tokens = row.num_ignored + row.num_counted;
        if (row.is_skipped != 0 || row.num_biases + row.num_forbidden + num_tokens == 0) continue;
        float* const logits = all_logits + static_cast<size_t>(index) * vocab_size;
        const u32* const biases = words + row.lists;
        const u32* const forbidden = biases + 2 * row.num_biases;
        const u32* const tokens = forbidden + row.num_forbidden;

        for (u32 i = first; i < row.num_biases; i += step) {
            const u32 token = biases[2 * i];
            if (token < num_ids && is_finite(logits[token])) {
                logits[token] = saturated(__fadd_rn(logits[token], __uint_as_float(biases[2 * i + 1])));
            }
        }
        __syncthreads();
        for (u32 i = first; i < row.num_forbidden; i += step) {
            const u32 token = forbidden[i];
            // The first visitor changes it.
            if (token < num_ids && atomicExch(&counts[token], 1u) == 0 && logits[token] < infinity()) {
                logits[token] = -infinity();
            }
        }
        __syncthreads();
        for (u32 i = first; i < row.num_forbidden; i += step) {
            if (forbidden[i] < num_ids) atomicExch(&counts[forbidden[i]], 0u);
        }
        __syncthreads();
        for (u32 i = first; i < num_tokens; i += step) {
            if (tokens[i] >= num_ids) continue;
            if (i < row.num_ignored) {
                atomicOr(&counts[tokens[i]], 1u);
            } else {
                atomicAdd(&counts[tokens[i]], 2u);
            }
        }
        __syncthreads();
        for (u32 i = first; i < num_tokens; i += step) {
            const u32 token = tokens[i];
            if (token >= num_ids) continue;
            const u32 count = atomicExch(&counts[token], 0u);
            if (count > 0 && is_finite(logits[token])) logits[token] = penalised(logits[token], row, count / 2);
        }
        // The counts are those of the next row now.
        __syncthreads();
    }
}
EXPORT_KERNEL(change_logits)
