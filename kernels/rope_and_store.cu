// Between the QKV projection and attention: the optional RMS norms of query and key heads, their rotation by position
// (RoFormer; Su et al., arXiv:2104.09864, which pairs element i of a head with element i + head_dim / 2), and the
// storing of keys and values in the cache.
//
//   qkv [num_rows][num_q_heads + 2 * num_kv_heads][head_dim] f32: query heads, key heads, value heads
//   angles [num_positions][cosines of head_dim / 2, sines of head_dim / 2] f32
//   q_norm, k_norm [head_dim] f32, or null for no norm         positions, slots [num_rows]
//   query_factors [num_positions] f32, or null: factors of rotated queries by their positions
//   norms_follow: whether heads are normalised behind their rotation
//   q [num_rows][num_q_heads][head_dim] bf16
//   sink_q, as q, or null: the queries at position min(its own, last_for_sinks)
//   keys, values [num_blocks][num_kv_heads][block_size][head_dim] bf16, int8 or e4m3
//   key_scales, value_scales [num_blocks][num_kv_heads][block_size] f32, not for bf16
//
// A row is stored in block slot / block_size, at position slot % block_size; slot NOWHERE: its key and value are not. A
// vector of codes is scale * codes: scale = max|x| / 127 (e4m3: 448), and the codes are x / scale, rounded to even. So
// e4m3 neither saturates nor underflows where a layer's values are large or small. A vector that is not finite gets the
// scale NaN,
// whatever its codes; one whose scale has no inverse in f32 becomes 0.
//
// Grid (num_rows, n), any n. A head belongs to a group of lanes, as many as hold 8 pairs each, rounded up to a power of
// two; a warp has several heads at once:
//
//   | 0 .. 7 | 8 .. 15 | ... | half .. half + 7 | ...        head_dim = 128: groups of 8 lanes, 4 heads in a warp
//   | lane 0 | lane 1  | ... | lane 0           | ...
//
// Moves per element 4 bytes of qkv and 2 (codes: 1) of output; angles come from the L2 cache. No shared memory; at most
// 104 registers, so that an SM holds two blocks of 256 threads.
#include "fp8.cuh"

namespace {

// Pairs of a lane, so heads of at most 512 elements.
constexpr int NUM_PAIRS = 8;

// The elements of a head that a lane has: pair j is x[0][j] and x[1][j].
struct Pairs {
    float x[2][NUM_PAIRS];
};

// Which pairs a lane has. With vectors they are consecutive; if the number of pairs is no multiple of 8, they are
// `num_lanes` apart.
struct Place {
    int half_dim, num_lanes, lane;
    bool has_vectors;

    __device__ __forceinline__ bool has(int j) const { return pair(j) < half_dim; }
    __device__ __forceinline__ int pair(int j) const {
        return has_vectors ? lane * NUM_PAIRS + j : lane + j * num_lanes;
    }
};

// Both halves of an array of 2 * half_dim elements; zeros where the lane has none.
__device__ __forceinline__ Pairs load(const float* from, const Place& place) {
    Pairs pairs = {};
    if (place.has_vectors) {
        if (place.has(0)) {
            load_8(pairs.x[0], from + place.pair(0));
            load_8(pairs.x[1], from + place.half_dim + place.pair(0));
        }
    } else {
#pragma unroll
        for (int j = 0; j < NUM_PAIRS; ++j) {
            if (place.has(j)) {
                pairs.x[0][j] = from[place.pair(j)];
                pairs.x[1][j] = from[place.half_dim + place.pair(j)];
            }
        }
    }
    return pairs;
}

__device__ __forceinline__ void store(bf16* to, const Pairs& pairs, const Place& place) {
    if (place.has_vectors) {
        if (place.has(0)) {
            store_8(to + place.pair(0), pairs.x[0]);
            store_8(to + place.half_dim + place.pair(0), pairs.x[1]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < NUM_PAIRS; ++j) {
            if (place.has(j)) {
                to[place.pair(j)] = to_bf16(pairs.x[0][j]);
                to[place.half_dim + place.pair(j)] = to_bf16(pairs.x[1][j]);
            }
        }
    }
}

// The codes of two numbers, in the lower half of a register.
template <class Code>
__device__ __forceinline__ u32 code_pair(float low, float high);

template <>
__device__ __forceinline__ u32 code_pair<i8>(float low, float high) {
    return (static_cast<u32>(__float2int_rn(low)) & 0xff) | (static_cast<u32>(__float2int_rn(high)) & 0xff) << 8;
}

template <>
__device__ __forceinline__ u32 code_pair<e4m3>(float low, float high) {
    return to_e4m3_pair(low, high);
}

// What the largest magnitude of a vector becomes.
template <class Code>
constexpr float MAX_CODE = 127.0f;
template <>
constexpr float MAX_CODE<e4m3> = MAX_E4M3;

template <class Code>
__device__ __forceinline__ void store_codes(Code* to, const Pairs& pairs, float inverse, const Place& place) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        Code* const start = to + half * place.half_dim;
        const float(&x)[NUM_PAIRS] = pairs.x[half];
        if (place.has_vectors) {
            u32 words[2] = {};
#pragma unroll
            for (int j = 0; j < NUM_PAIRS; j += 2) {
                words[j / 4] |= code_pair<Code>(x[j] * inverse, x[j + 1] * inverse) << 8 * (j % 4);
            }
            if (place.has(0)) *reinterpret_cast<uint2*>(start + place.pair(0)) = make_uint2(words[0], words[1]);
        } else {
#pragma unroll
            for (int j = 0; j < NUM_PAIRS; ++j) {
                if (!place.has(j)) continue;
                const u8 code = static_cast<u8>(code_pair<Code>(x[j] * inverse, 0.0f));
                *reinterpret_cast<u8*>(start + place.pair(j)) = code;
            }
        }
    }
}

__device__ __forceinline__ void normalise(Pairs& pairs, const float* weight, float eps, const Place& place) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < NUM_PAIRS; ++j) sum += pairs.x[0][j] * pairs.x[0][j] + pairs.x[1][j] * pairs.x[1][j];
    sum = group_sum(sum, place.num_lanes);
    const float scale = 1.0f / sqrtf(sum / (2 * place.half_dim) + eps);
    const Pairs weights = load(weight, place);
#pragma unroll
    for (int j = 0; j < NUM_PAIRS; ++j) {
        pairs.x[0][j] = pairs.x[0][j] * scale * weights.x[0][j];
        pairs.x[1][j] = pairs.x[1][j] * scale * weights.x[1][j];
    }
}

__device__ __forceinline__ void rotate(Pairs& pairs, const Pairs& angles) {
#pragma unroll
    for (int j = 0; j < NUM_PAIRS; ++j) {
        const float x = pairs.x[0][j], y = pairs.x[1][j], cosine = angles.x[0][j], sine = angles.x[1][j];
        pairs.x[0][j] = x * cosine - y * sine;
        pairs.x[1][j] = y * cosine + x * sine;
    }
}

struct Scale {
    float scale, inverse;
};

// The scale of a vector of codes. All lanes of the warp call it.
template <class Code>
__device__ __forceinline__ Scale scale_of(const Pairs& pairs, const Place& place) {
    float largest = 0.0f;
    bool is_finite = true;
#pragma unroll
    for (int j = 0; j < NUM_PAIRS; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float size = fabsf(pairs.x[half][j]);
            is_finite &= size < infinity();
            largest = fmaxf(largest, size);
        }
    }
    // fmaxf ignores NaN, so what is not finite becomes infinity.
    largest = group_max(is_finite ? largest : infinity(), place.num_lanes);
    if (largest == infinity()) return {__uint_as_float(0x7fc00000u), 0.0f};
    const float scale = largest / MAX_CODE<Code>;
    // The least normal number: below it the inverse may be infinite.
    if (scale <= 1.17549435e-38f) return {0.0f, 0.0f};
    return {scale, 1.0f / scale};
}

template <class Element>
__device__ __forceinline__ void rope_and_store(bf16* __restrict__ q, bf16* __restrict__ sink_q, u32 last_for_sinks,
                                               Element* __restrict__ keys, Element* __restrict__ values,
                                               float* __restrict__ key_scales, float* __restrict__ value_scales,
                                               const float* __restrict__ qkv,
                                               const float* __restrict__ angles, const float* __restrict__ q_norm,
                                               const float* __restrict__ k_norm, float eps,
                                               const u32* __restrict__ positions, const u32* __restrict__ slots,
                                               int num_q_heads, int num_kv_heads, int head_dim, int block_size,
                                               const float* __restrict__ query_factors, int norms_follow) {
    const size_t row = blockIdx.x;
    const int half_dim = head_dim / 2;
    int num_lanes = 1;
    while (num_lanes * NUM_PAIRS < half_dim) num_lanes *= 2;
    const Place place = {half_dim, num_lanes, static_cast<int>(threadIdx.x) % num_lanes, half_dim % NUM_PAIRS == 0};
    // Behind the heads of a row come its queries again, for the sinks.
    const int num_row_heads = num_q_heads + 2 * num_kv_heads;
    const int num_heads = num_row_heads + (sink_q != nullptr ? num_q_heads : 0), num_groups = blockDim.x / num_lanes;
    const u32 slot = slots[row], position = positions[row];
    // All lanes of a warp go through the same number of rounds, because they exchange sums.
    const int group = threadIdx.x / num_lanes, last = num_heads - 1;
    for (int first = blockIdx.y * num_groups; first < num_heads; first += gridDim.y * num_groups) {
        const bool has_head = first + group < num_heads;
        const int place_of_head = has_head ? first + group : last;
        const bool is_for_sinks = place_of_head >= num_row_heads;
        const int head = is_for_sinks ? place_of_head - num_row_heads : place_of_head;
        const bool is_query = head < num_q_heads, is_value = head >= num_q_heads + num_kv_heads;
        Pairs pairs = load(qkv + (row * num_row_heads + head) * head_dim, place);
        // The norms of a group are its own, but all lanes of the warp add up.
        const auto normalise_head = [&] {
            const float* const weight = is_query ? q_norm : k_norm;
            Pairs normalised = pairs;
            normalise(normalised, weight != nullptr ? weight : q_norm != nullptr ? q_norm : k_norm, eps, place);
            if (!is_value && weight != nullptr) pairs = normalised;
        };
        const bool has_norm = q_norm != nullptr || k_norm != nullptr;
        if (has_norm && !norms_follow) normalise_head();
        const size_t rotation = is_for_sinks ? min(position, last_for_sinks) : position;
        if (!is_value) rotate(pairs, load(angles + rotation * head_dim, place));
        if (has_norm && norms_follow) normalise_head();
        if (is_query && query_factors != nullptr) {
            const float factor = query_factors[position];
#pragma unroll
            for (int j = 0; j < NUM_PAIRS; ++j) pairs.x[0][j] *= factor, pairs.x[1][j] *= factor;
        }
        if (is_query && has_head) {
            store((is_for_sinks ? sink_q : q) + (row * num_q_heads + head) * head_dim, pairs, place);
        }
        const bool is_stored = has_head && !is_query && slot != NOWHERE;
        const int kv_head = head - num_q_heads - (is_value ? num_kv_heads : 0);
        const size_t block = slot / block_size, offset = slot % block_size;
        const size_t to = (block * num_kv_heads + kv_head) * block_size + offset;
        if constexpr (sizeof(Element) == sizeof(bf16)) {
            if (is_stored) store((is_value ? values : keys) + to * head_dim, pairs, place);
        } else {
            const Scale scale = scale_of<Element>(pairs, place);
            if (is_stored) {
                store_codes((is_value ? values : keys) + to * head_dim, pairs, scale.inverse, place);
                if (place.lane == 0) (is_value ? value_scales : key_scales)[to] = scale.scale;
            }
        }
    }
}

}  // namespace

KERNEL(rope_and_store_bf16, 512)
(bf16* q, bf16* sink_q, u32 last_for_sinks, bf16* keys, bf16* values, float* key_scales, float* value_scales,
 const float* qkv, const float* angles, const float* q_norm, const float* k_norm, float eps, const u32* positions,
 const u32* slots, int num_q_heads, int num_kv_heads, int head_dim, int block_size, const float* query_factors,
 int norms_follow) {
    rope_and_store(q, sink_q, last_for_sinks, keys, values, key_scales, value_scales, qkv, angles, q_norm, k_norm, eps,
                   positions, slots, num_q_heads, num_kv_heads, head_dim, block_size, query_factors, norms_follow);
}
EXPORT_KERNEL(rope_and_store_bf16)

KERNEL(rope_and_store_int8, 512)
(bf16* q, bf16* sink_q, u32 last_for_sinks, i8* keys, i8* values, float* key_scales, float* value_scales,
 const float* qkv, const float* angles, const float* q_norm, const float* k_norm, float eps, const u32* positions,
 const u32* slots, int num_q_heads, int num_kv_heads, int head_dim, int block_size, const float* query_factors,
 int norms_follow) {
    rope_and_store(q, sink_q, last_for_sinks, keys, values, key_scales, value_scales, qkv, angles, q_norm, k_norm, eps,
                   positions, slots, num_q_heads, num_kv_heads, head_dim, block_size, query_factors, norms_follow);
}
EXPORT_KERNEL(rope_and_store_int8)

KERNEL(rope_and_store_fp8, 512)
(bf16* q, bf16* sink_q, u32 last_for_sinks, e4m3* keys, e4m3* values, float* key_scales, float* value_scales,
 const float* qkv, const float* angles, const float* q_norm, const float* k_norm, float eps, const u32* positions,
 const u32* slots, int num_q_heads, int num_kv_heads, int head_dim, int block_size, const float* query_factors,
 int norms_follow) {
    rope_and_store(q, sink_q, last_for_sinks, keys, values, key_scales, value_scales, qkv, angles, q_norm, k_norm, eps,
                   positions, slots, num_q_heads, num_kv_heads, head_dim, block_size, query_factors, norms_follow);
}
EXPORT_KERNEL(rope_and_store_fp8)
