// The next token of each row of logits: the most likely one, or one drawn from the softmax after top-k, top-p and
// min-p. The tokens are those of crates/sampling/src/sampler.rs, whose steps and roundings these are.
//
//   logits [num_rows][vocab_size] f32    rows [num_rows]: how to sample    tokens [num_rows] u32, or a code below
//
// Tokens are ordered by one number: the logit, then the lower id. A cut is the least number that is kept.
//
//   1. the largest number: the most likely token, and whether all logits are numbers
//   2. top-k: the k-th largest number          } by digits, from the highest on: the histogram of a digit says which value
//   3. top-p: where the mass reaches the share } the cut has there, and the next digit is looked at for that value only
//   4. min-p: a logit
//   5. the mass of each 64 tokens, in the order of the CPU; the token at the position of a random number
//
// Masses of histograms are integers of 2^-44, so that the order of additions does not matter. The CPU adds up floats:
// where the share is reached so closely that the two may differ, the answer is ASK_HOST, and the host samples the row.
// That happens to about one row in p * 2^19, where p is the probability of the last token in the nucleus.
//
// Grid (num_rows); dynamic shared memory for ceil(vocab_size / 64) doubles. Reads the logits twice without a cut, and
// once more per digit: usually 2 or 3 for top-k and as many for top-p, mostly from the L2 cache. One block has one row.
// 24 KiB of static shared memory. Measured on an H100 with one row of 128256 logits: 21 us greedy, 93 us for a draw
// from all tokens, and 620 us with top-p if many logits are equal (docs/src/results-gpus.md).
#include "sampling.cuh"

// Instead of a token: a logit is NaN or +infinity; all are -infinity; see above.
constexpr u32 NOT_FINITE = 0xffffffffu;
constexpr u32 NONE_ALLOWED = 0xfffffffeu;
constexpr u32 ASK_HOST = 0xfffffffdu;

namespace {

constexpr int DIGIT_BITS = 11, NUM_BINS = 1 << DIGIT_BITS;
constexpr int MASS_BLOCK = 64;
// Logits that a thread reads at a time, so that it waits for memory once for all of them.
constexpr int NUM_AT_ONCE = 8;
constexpr u64 NOT_A_NUMBER = ~0ull;

// The number that orders tokens. Adding 0 makes -0 equal to 0.
__device__ __forceinline__ u64 rank(float logit, int id) {
    const u32 bits = __float_as_uint(__fadd_rn(logit, 0.0f));
    const u32 order = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
    return static_cast<u64>(order) << 32 | static_cast<u32>(~id);
}

__device__ __forceinline__ float logit_of(u64 rank) {
    const u32 order = static_cast<u32>(rank >> 32);
    return __uint_as_float(order ^ (order >> 31 ? 0x80000000u : 0xffffffffu));
}

// e^x for x <= 0: crates/sampling/src/exp.rs, with its roundings.
__device__ __forceinline__ float exp_nonpositive(float x) {
    constexpr float ROUNDER = 12582912.0f;
    const float shifted = __fadd_rn(__fmul_rn(x, 1.44269504f), ROUNDER);
    const float n = __fsub_rn(shifted, ROUNDER);
    const float r = __fsub_rn(__fsub_rn(x, __fmul_rn(n, 0.6933594f)), __fmul_rn(n, -2.1219444e-4f));
    float series = 1.0f / 5040.0f;
    const float terms[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < 7; ++i) series = __fadd_rn(__fmul_rn(series, r), terms[i]);
    const u32 exponent = __float_as_uint(shifted) - __float_as_uint(ROUNDER) + 127;
    return x < -87.0f ? 0.0f : __fmul_rn(series, __uint_as_float(exponent << 23));
}

struct Softmax {
    float max, temperature;

    // The most likely token weighs 1.
    __device__ __forceinline__ float weight(float logit) const {
        return exp_nonpositive(__fdiv_rn(__fsub_rn(logit, max), temperature));
    }
    __device__ __forceinline__ u64 mass(float logit) const {
        return static_cast<u64>(static_cast<double>(weight(logit)) * 0x1p44);
    }
};

// A uniform number of [0, 1): crates/sampling/src/random.rs (Philox4x32-10; Salmon et al., SC 2011).
__device__ __forceinline__ double uniform(u64 seed, u64 num_generated) {
    u32 counter[4] = {static_cast<u32>(num_generated), static_cast<u32>(num_generated >> 32), 0, 0};
    u32 key[2] = {static_cast<u32>(seed), static_cast<u32>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const u64 a = 0xD2511F53ull * counter[0], b = 0xCD9E8D57ull * counter[2];
        counter[0] = static_cast<u32>(b >> 32) ^ counter[1] ^ key[0];
        counter[1] = static_cast<u32>(b);
        counter[2] = static_cast<u32>(a >> 32) ^ counter[3] ^ key[1];
        counter[3] = static_cast<u32>(a);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    const u64 bits = static_cast<u64>(counter[1]) << 32 | counter[0];
    return static_cast<double>(bits >> 11) * 0x1p-53;
}

// Reductions over the block; scratch holds WARP_SIZE numbers.
template <class Reduce>
__device__ __forceinline__ u64 block_reduce(u64 x, u64* scratch, Reduce reduce) {
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2) {
        x = reduce(x, __shfl_xor_sync(ALL_LANES, x, distance));
    }
    const int num_warps = blockDim.x / WARP_SIZE;
    // Numbers of an earlier call may still be read.
    __syncthreads();
    if (threadIdx.x % WARP_SIZE == 0) scratch[threadIdx.x / WARP_SIZE] = x;
    __syncthreads();
    u64 all = scratch[0];
    for (int warp = 1; warp < num_warps; ++warp) all = reduce(all, scratch[warp]);
    return all;
}

// Calls body(logit, id) for all tokens, in all lanes of a warp at a time. Beyond the last token the logit is -infinity,
// and id vocab_size or more.
template <class Body>
__device__ __forceinline__ void for_each_token(const float* logits, int vocab_size, Body body) {
    // With a counter besides `first`, registers spill on sm_86 and sm_89.
    for (int first = threadIdx.x; first - static_cast<int>(threadIdx.x) < vocab_size; first += NUM_AT_ONCE * blockDim.x) {
        float read[NUM_AT_ONCE];
#pragma unroll
        for (int i = 0; i < NUM_AT_ONCE; ++i) {
            const int id = first + i * static_cast<int>(blockDim.x);
            read[i] = id < vocab_size ? logits[id] : -infinity();
        }
#pragma unroll
        for (int i = 0; i < NUM_AT_ONCE; ++i) body(read[i], first + i * static_cast<int>(blockDim.x));
    }
}

// What is known of a cut after some digits.
struct Search {
    // The digits so far, the others being 0.
    u64 cut;
    // The measure of all tokens above those with these digits, and of those.
    u64 above, within;
    u32 num_within;
    // The measure of all tokens that were searched, and the part of it that the cut keeps.
    u64 total, target;
};

struct Histogram {
    // Bins of the values of a digit: the measure and the number of tokens.
    u64* measures;
    u32* counts;
    Search* found;
};

// Adds the tokens of a warp to their bins. Most of them have one of few digits, and additions to one place wait for
// each other:
// so the lanes with the same bin are added up first, for a few bins, and the rest add by themselves. A measure is below
// 2^45.
__device__ __forceinline__ void add_to_bins(const Histogram& histogram, bool is_within, u32 bin, u64 measure) {
    constexpr int NUM_SHARED_BINS = 4, LOW_BITS = 22;
    const int lane = threadIdx.x % WARP_SIZE;
    u32 left = __ballot_sync(ALL_LANES, is_within);
    for (int i = 0; i < NUM_SHARED_BINS && left != 0; ++i) {
        const int first = __ffs(static_cast<int>(left)) - 1;
        const u32 shared_bin = __shfl_sync(ALL_LANES, bin, first);
        const bool is_shared = is_within && bin == shared_bin;
        const u32 lanes = __ballot_sync(ALL_LANES, is_shared);
        // 32 numbers of at most 23 bits: neither sum overflows.
        const u32 low = is_shared ? static_cast<u32>(measure) & ((1u << LOW_BITS) - 1) : 0;
        const u32 high = is_shared ? static_cast<u32>(measure >> LOW_BITS) : 0;
        const u64 sum = (static_cast<u64>(__reduce_add_sync(ALL_LANES, high)) << LOW_BITS) + __reduce_add_sync(ALL_LANES, low);
        if (lane == first) {
            atomicAdd(&histogram.measures[bin], sum);
            atomicAdd(&histogram.counts[bin], static_cast<u32>(__popc(lanes)));
        }
        is_within = is_within && !is_shared;
        left &= ~lanes;
    }
    if (is_within) {
        atomicAdd(&histogram.measures[bin], measure);
        atomicAdd(&histogram.counts[bin], 1u);
    }
}

// One warp finds the bin where the measure from the top reaches the target. Lane l sums bins that are below those of
// lane l - 1.
template <class Target>
__device__ __forceinline__ void find_bin(const Histogram& histogram, Search before, bool is_first, Target target_of, int shift) {
    constexpr int LANE_BINS = NUM_BINS / WARP_SIZE;
    const int lane = threadIdx.x, top = NUM_BINS - 1 - lane * LANE_BINS;
    u64 own = 0;
    for (int i = 0; i < LANE_BINS; ++i) own += histogram.measures[top - i];
    u64 through = own;
    for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
        const u64 other = __shfl_up_sync(ALL_LANES, through, distance);
        if (lane >= distance) through += other;
    }
    // The first digit is one of all tokens.
    const u64 total = is_first ? __shfl_sync(ALL_LANES, through, WARP_SIZE - 1) : before.total;
    const u64 target = is_first ? target_of(total) : before.target;
    u64 above = before.above + through - own;
    // Exactly one lane has the bin, because all of them together reach the target.
    if (above < target && above + own >= target) {
        int bin = top;
        while (above + histogram.measures[bin] < target) above += histogram.measures[bin--];
        *histogram.found = {before.cut | static_cast<u64>(bin) << shift, above,  histogram.measures[bin],
                            histogram.counts[bin],                       total, target};
    }
}

// The largest cut that keeps tokens with a measure of target_of(total) together, of those that `least` keeps, whose
// measure is `total`: the target is above 0 and at most the total.
template <class Target, class Measure>
__device__ __forceinline__ Search find_cut(const float* logits, int vocab_size, u64 least, const Histogram& histogram,
                                           Target target_of, Measure measure) {
    Search search = {};
    int bits_above = 0;
    while (bits_above < 64) {
        const int num_bits = min(DIGIT_BITS, 64 - bits_above), shift = 64 - bits_above - num_bits;
        for (int i = threadIdx.x; i < NUM_BINS; i += blockDim.x) histogram.measures[i] = 0, histogram.counts[i] = 0;
        __syncthreads();
        for_each_token(logits, vocab_size, [&](float logit, int id) {
            const u64 number = rank(logit, id);
            const bool has_digits = bits_above == 0 || (number ^ search.cut) >> (64 - bits_above) == 0;
            const bool is_within = id < vocab_size && number >= least && has_digits;
            const u32 bin = static_cast<u32>(number >> shift) & (NUM_BINS - 1) & ((1u << num_bits) - 1);
            add_to_bins(histogram, is_within, bin, is_within ? measure(logit) : 0);
        });
        __syncthreads();
        if (threadIdx.x < WARP_SIZE) find_bin(histogram, search, bits_above == 0, target_of, shift);
        __syncthreads();
        search = *histogram.found;
        bits_above += num_bits;
        // One token: whatever its other digits are, it is the last that is kept.
        if (search.num_within == 1) break;
    }
    return search;
}

// Sums of masses of 64 tokens: eight lanes, then the lanes, as in crates/sampling/src/draw.rs.
__device__ __forceinline__ void find_masses(double* masses, const float* logits, int vocab_size, Softmax softmax, u64 cut) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, num_warps = blockDim.x / WARP_SIZE;
    const int num_blocks = (vocab_size + MASS_BLOCK - 1) / MASS_BLOCK;
    for (int first = warp * 4; first < num_blocks; first += num_warps * 4) {
        const int block = first + lane / 8;
        const int first_id = block * MASS_BLOCK + lane % 8;
        float read[8], sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) read[i] = first_id + i * 8 < vocab_size ? logits[first_id + i * 8] : -infinity();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int id = first_id + i * 8;
            if (id < vocab_size && rank(read[i], id) >= cut) sum = __fadd_rn(sum, softmax.weight(read[i]));
        }
        double mass = 0.0;
        for (int i = 0; i < 8; ++i) {
            mass = __dadd_rn(mass, static_cast<double>(__shfl_sync(ALL_LANES, sum, lane / 8 * 8 + i)));
        }
        if (lane % 8 == 0 && block < num_blocks) masses[block] = mass;
    }
}

// The token at `position` of the kept tokens, which are laid end to end in order of id. One warp: all lanes add up the
// same masses one after the other, as the CPU does, and share the tokens of a block.
__device__ __forceinline__ u32 draw(const double* masses, const float* logits, int vocab_size, Softmax softmax, u64 cut,
                                    double position) {
    const int num_blocks = (vocab_size + MASS_BLOCK - 1) / MASS_BLOCK, lane = threadIdx.x;
    double total = 0.0;
#pragma unroll 8
    for (int i = 0; i < num_blocks; ++i) total = __dadd_rn(total, masses[i]);
    double ahead = __dmul_rn(position, total);
    int chosen = 0;
    bool is_found = false;
    for (int first = 0; first < num_blocks && !is_found; first += NUM_AT_ONCE) {
        double read[NUM_AT_ONCE];
#pragma unroll
        for (int i = 0; i < NUM_AT_ONCE; ++i) read[i] = first + i < num_blocks ? masses[first + i] : 0.0;
#pragma unroll
        for (int i = 0; i < NUM_AT_ONCE; ++i) {
            if (!is_found && read[i] > 0.0) {
                chosen = first + i;
                is_found = ahead < read[i];
                if (!is_found) ahead = __dadd_rn(ahead, -read[i]);
            }
        }
    }
    const int start = chosen * MASS_BLOCK;
    const auto weight_of = [&](int id) {
        if (id >= vocab_size) return 0.0f;
        const float logit = logits[id];
        return rank(logit, id) >= cut ? softmax.weight(logit) : 0.0f;
    };
    const float weights[2] = {weight_of(start + lane), weight_of(start + WARP_SIZE + lane)};
    u32 token = start;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < WARP_SIZE; ++i) {
            const double weight = __shfl_sync(ALL_LANES, weights[half], i);
            if (weight > 0.0) {
                token = start + half * WARP_SIZE + i;
                if (ahead < weight) return token;
                ahead = __dadd_rn(ahead, -weight);
            }
        }
    }
    return token;
}

}  // namespace

KERNEL(sample, 1024)
(u32* __restrict__ tokens, const float* __restrict__ all_logits, const SamplingRow* __restrict__ rows, int vocab_size) {
    DYNAMIC_SHARED(double, masses);
    SHARED_ARRAY(u64, measures, NUM_BINS);
    SHARED_ARRAY(u32, counts, NUM_BINS);
    SHARED_ARRAY(u64, scratch, WARP_SIZE);
    SHARED_ARRAY(Search, found, 1);
    const SamplingRow row = rows[blockIdx.x];
    if (row.is_skipped != 0) {
        if (threadIdx.x == 0) tokens[blockIdx.x] = ASK_HOST;
        return;
    }
    const float* const logits = all_logits + static_cast<size_t>(blockIdx.x) * vocab_size;
    const auto largest_of = [](u64 a, u64 b) { return a > b ? a : b; };

    u64 best = 0;
    for_each_token(logits, vocab_size, [&](float logit, int id) {
        best = largest_of(best, logit < infinity() ? rank(logit, id) : NOT_A_NUMBER);
    });
    best = block_reduce(best, scratch, largest_of);
    const float max_logit = logit_of(best);
    u32 answer = ~static_cast<u32>(best);
    if (best == NOT_A_NUMBER) {
        answer = NOT_FINITE;
    } else if (max_logit == -infinity()) {
        answer = NONE_ALLOWED;
    } else if (row.temperature > 0.0f && row.top_k != 1) {
        const Softmax softmax = {max_logit, row.temperature};
        const Histogram histogram = {measures, counts, found};
        u64 cut = 0;
        if (row.top_k > 0 && row.top_k < static_cast<u32>(vocab_size)) {
            const auto num_kept = [&](u64) -> u64 { return row.top_k; };
            cut = find_cut(logits, vocab_size, 0, histogram, num_kept, [](float) -> u64 { return 1; }).cut;
        }
        bool is_certain = true;
        if (row.top_p < 1.0f) {
            const auto share_of = [&](u64 total) {
                return max(1ull, static_cast<u64>(static_cast<double>(row.top_p) * static_cast<double>(total)));
            };
            const Search search = find_cut(logits, vocab_size, cut, histogram, share_of,
                                           [&](float logit) { return softmax.mass(logit); });
            cut = largest_of(cut, search.cut);
            const u64 margin = search.total >> 20, below = search.target - search.above;
            is_certain = below > margin && search.within - below > margin;
        }
        if (row.log_min_p > -static_cast<double>(infinity())) {
            const double floor =
                __dadd_rn(static_cast<double>(max_logit), __dmul_rn(static_cast<double>(row.temperature), row.log_min_p));
            // The id makes all tokens with this logit stay.
            cut = largest_of(cut, rank(fminf(static_cast<float>(floor), max_logit), -1));
        }
        find_masses(masses, logits, vocab_size, softmax, cut);
        __syncthreads();
        if (threadIdx.x < WARP_SIZE) {
            const double position = uniform(row.seed, row.num_generated);
            answer = is_certain ? draw(masses, logits, vocab_size, softmax, cut, position) : ASK_HOST;
        }
    }
    if (threadIdx.x == 0) tokens[blockIdx.x] = answer;
}
EXPORT_KERNEL(sample)
