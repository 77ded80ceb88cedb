// The experts of each row, by the logits of a router: crates/device/src/experts.rs has the rules.
//
//   route_softmax        the largest logits; weights are their softmax, over the chosen ones or over all
//   route_sparse_mixer   one after the other; the weight of each is its share among those of the rest that are near it
//   route_grouped        the largest scores of the best groups; corrections count for the choice alone
//
//   experts [num_rows][num_chosen] u32    weights [num_rows][num_chosen]    shared_weights [num_rows]
//   logits [num_rows][num_logits], num_logits = num_experts, or one more: that of the shared expert
//   correction [num_experts], or null     num_rows: how many rows of the grid there are, in memory; null: all
//
// Of equal numbers, the first one is the larger one; NaN counts as -infinity, so that the experts of a row differ
// whatever the logits are. A row beyond num_rows gets num_experts for each of its experts: none.
//
// Grid (rows), blocks of 32 threads, at most 1024 experts. route_grouped has num_experts + num_groups floats of dynamic
// shared memory. A row reads its logits num_chosen times, from the L1 cache but for the first time. Not measured yet.
#include "common.cuh"

namespace {

// RouterScores of crates/device.
enum Scores { SOFTMAX = 0, SIGMOID = 1, SIGMOID_OF_LOGIT = 2 };

struct Found {
    float value;
    u32 index;
};

// Finds the largest of values[first .. last) that is not taken, and takes it. Bit i of a lane's `taken` stands for
// value first + lane + 32 * i.
__device__ __forceinline__ Found take_largest(const float* values, int first, int last, u32& taken) {
    const u32 lane = threadIdx.x;
    Found best = {-infinity(), NOWHERE};
    for (int i = 0, at = first + lane; at < last; ++i, at += WARP_SIZE) {
        if (taken >> i & 1) continue;
        const float value = values[at];
        // Not larger: not a number.
        if (value > best.value || best.index == NOWHERE) best = {value > -infinity() ? value : -infinity(), static_cast<u32>(at)};
    }
#pragma unroll
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2) {
        const float value = __shfl_xor_sync(ALL_LANES, best.value, distance);
        const u32 index = __shfl_xor_sync(ALL_LANES, best.index, distance);
        if (value > best.value || (value == best.value && index < best.index)) best = {value, index};
    }
    const u32 place = best.index - first;
    if (place % WARP_SIZE == lane) taken |= 1u << place / WARP_SIZE;
    return best;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// A row, and where what is chosen for it goes. Rank r is written and read by lane r % 32 alone.
struct Row {
    const float* logits;
    u32* experts;
    float* weights;

    __device__ __forceinline__ void choose(int rank, u32 expert, float weight) const {
        if (rank % WARP_SIZE == static_cast<int>(threadIdx.x)) experts[rank] = expert, weights[rank] = weight;
    }
};

struct Rows {
    u32* experts;
    float* weights;
    float* shared_weights;
    const float* logits;
    const u32* num_rows;
    int num_experts, num_chosen, num_logits;

    __device__ __forceinline__ Row row() const {
        const size_t at = blockIdx.x;
        return {logits + at * num_logits, experts + at * num_chosen, weights + at * num_chosen};
    }

    // Whether there is this block's row. The weight of its shared expert is written.
    __device__ __forceinline__ bool begin() const {
        const Row row = this->row();
        if (num_rows != nullptr && blockIdx.x >= *num_rows) {
            for (int rank = threadIdx.x; rank < num_chosen; rank += WARP_SIZE) row.choose(rank, num_experts, 0.0f);
            return false;
        }
        if (threadIdx.x == 0) {
            shared_weights[blockIdx.x] = num_logits > num_experts ? sigmoid(row.logits[num_experts]) : 1.0f;
        }
        return true;
    }
};

}  // namespace

KERNEL(route_softmax, 32)
(u32* experts, float* weights, float* shared_weights, const float* logits, const u32* num_rows, int num_experts,
 int num_chosen, int num_logits, int is_normalised) {
    const Rows rows = {experts, weights, shared_weights, logits, num_rows, num_experts, num_chosen, num_logits};
    if (!rows.begin()) return;
    const Row row = rows.row();
    u32 taken = 0;
    float largest = 0.0f, total = 0.0f;
    for (int rank = 0; rank < num_chosen; ++rank) {
        const Found found = take_largest(row.logits, 0, num_experts, taken);
        if (rank == 0) largest = found.value;
        total += expf(found.value - largest);
        row.choose(rank, found.index, found.value);
    }
    if (!is_normalised) {
        total = 0.0f;
        for (int at = threadIdx.x; at < num_experts; at += WARP_SIZE) total += expf(row.logits[at] - largest);
        total = warp_sum(total);
    }
    for (int rank = threadIdx.x; rank < num_chosen; rank += WARP_SIZE) {
        row.weights[rank] = expf(row.weights[rank] - largest) / total;
    }
}
EXPORT_KERNEL(route_softmax)

KERNEL(route_sparse_mixer, 32)
(u32* experts, float* weights, float* shared_weights, const float* logits, const u32* num_rows, int num_experts,
 int num_chosen, int num_logits, float jitter) {
    const Rows rows = {experts, weights, shared_weights, logits, num_rows, num_experts, num_chosen, num_logits};
    if (!rows.begin()) return;
    const Row row = rows.row();
    u32 taken = 0;
    for (int rank = 0; rank < num_chosen; ++rank) {
        const u32 taken_before = taken;
        const Found found = take_largest(row.logits, 0, num_experts, taken);
        float total = 0.0f;
        for (int i = 0, at = threadIdx.x; at < num_experts; ++i, at += WARP_SIZE) {
            const float logit = row.logits[at];
            const float distance = (found.value - logit) / fmaxf(fabsf(logit), found.value);
            // Near is also what cannot be compared.
            const bool is_near = !(distance > 2.0f * jitter);
            if (is_near && (taken_before >> i & 1) == 0) total += expf(logit - found.value);
        }
        row.choose(rank, found.index, 1.0f / warp_sum(total));
    }
}
EXPORT_KERNEL(route_sparse_mixer)

KERNEL(route_grouped, 32)
(u32* experts, float* weights, float* shared_weights, const float* logits, const float* correction, const u32* num_rows,
 int num_experts, int num_chosen, int num_logits, int scores, int num_groups, int num_chosen_groups,
 int num_group_scores, int is_normalised, float scale) {
    DYNAMIC_SHARED(float, corrected);
    float* const group_scores = corrected + num_experts;
    const Rows rows = {experts, weights, shared_weights, logits, num_rows, num_experts, num_chosen, num_logits};
    if (!rows.begin()) return;
    const Row row = rows.row();
    float largest = -infinity(), total = 0.0f;
    const bool has_sigmoids = scores != SOFTMAX;
    if (!has_sigmoids) {
        for (int at = threadIdx.x; at < num_experts; at += WARP_SIZE) largest = fmaxf(largest, row.logits[at]);
        largest = warp_max(largest);
        for (int at = threadIdx.x; at < num_experts; at += WARP_SIZE) total += expf(row.logits[at] - largest);
        total = warp_sum(total);
    }
    const auto score = [&](u32 expert) {
        const float logit = row.logits[expert];
        return has_sigmoids ? sigmoid(logit) : expf(logit - largest) / total;
    };
    for (int at = threadIdx.x; at < num_experts; at += WARP_SIZE) {
        corrected[at] = (scores == SIGMOID_OF_LOGIT ? row.logits[at] : score(at)) + (correction != nullptr ? correction[at] : 0.0f);
    }
    __syncthreads();

    const int group_len = num_experts / num_groups;
    for (int group = 0; group < num_groups; ++group) {
        u32 taken = 0;
        float sum = 0.0f;
        for (int i = 0; i < num_group_scores; ++i) {
            sum += take_largest(corrected, group * group_len, (group + 1) * group_len, taken).value;
        }
        if (threadIdx.x == 0) group_scores[group] = sum;
    }
    __syncthreads();
    // Experts of other groups are not there to be chosen.
    u32 groups_taken = 0, taken = ALL_LANES;
    for (int i = 0; i < num_chosen_groups; ++i) {
        const int group = take_largest(group_scores, 0, num_groups, groups_taken).index;
        for (int j = 0, at = threadIdx.x; at < num_experts; ++j, at += WARP_SIZE) {
            if (at / group_len == group) taken &= ~(1u << j);
        }
    }
    float sum = 0.0f;
    for (int rank = 0; rank < num_chosen; ++rank) {
        const u32 expert = take_largest(corrected, 0, num_experts, taken).index;
        const float weight = score(expert);
        sum += weight;
        row.choose(rank, expert, weight);
    }
    // Scores may all be zero.
    const float divisor = is_normalised ? sum + 1e-20f : 1.0f;
    for (int rank = threadIdx.x; rank < num_chosen; rank += WARP_SIZE) row.weights[rank] = row.weights[rank] / divisor * scale;
}
EXPORT_KERNEL(route_grouped)
