// Around latent_attention.cu: what is stored of a token, and the queries and results of heads on their way to the
// products with the heads' matrices (crates/device/src/latent.rs has the formulas).
//
//   store_latents       keys[slot] = (norm(kv[row][.. latent_dim]), rotate(kv[row][latent_dim ..]))
//   split_queries       by_heads[head][row] = q[row][first + head][.. content_dim]
//   rotate_queries      keyed[row][head] = (latents[head][row], rotate(q[row][first + head][content_dim ..]))
//   split_attended      by_heads[head][row] = attended[row][head]
//   join_values         out[row][first + head] = values[head][row]
//   tile_heads          tiles = (first + head, head * num_rows + first row, rows, 0), for every tile_rows rows of each head
//
//   kv [num_rows][latent_dim + rotary_dim] f32    weight [latent_dim] f32    angles [num_positions][cosines, sines of rotary_dim / 2] f32
//   keys [num_blocks][block_size][latent_dim + rotary_dim] bf16              positions, slots [num_rows]
//   q [num_rows][all heads][content_dim + rotary_dim] f32
//   by_heads [num_heads][num_rows][width] bf16    latents, values [num_heads][num_rows][width] f32
//   keyed, attended, out [num_rows][num_heads, out: all heads][width] bf16
//
// The norm is x / sqrt(mean(x^2) + eps) * weight; a rotation pairs element i with i + rotary_dim / 2. A row of slot
// NOWHERE is not stored. latent_dim and rotary_dim are even. tiles: as sort_experts.cu writes them, for the products of
// expert_gemm.cu and quantised_expert_gemm.cu, with the heads as experts that have all rows.
//
// Grid of store_latents: (num_rows), block 128; of tile_heads: (num_heads), any block. Of the others: (num_rows, n),
// any n, blocks of any size. Each element is read and written once. store_latents: 128 bytes of shared memory.
#include "common.cuh"

namespace {

__device__ __forceinline__ float2 load_pair(const float* from) { return *reinterpret_cast<const float2*>(from); }

__device__ __forceinline__ void store_pair(bf16* to, float2 x) { *reinterpret_cast<u32*>(to) = to_bf16_pair(x.x, x.y); }

// Element `i` of the rotated vector `x` of 2 * half_dim elements.
__device__ __forceinline__ float rotated(const float* x, const float* angles, int half_dim, int i) {
    const int pair = i < half_dim ? i : i - half_dim;
    const float low = x[pair], high = x[pair + half_dim], cosine = angles[pair], sine = angles[half_dim + pair];
    return i < half_dim ? low * cosine - high * sine : high * cosine + low * sine;
}

// Calls body(head, element) for every `unit`th element of `width` of a row's heads.
template <int unit, class Body>
__device__ __forceinline__ void for_each(int num_heads, int width, Body body) {
    const int units = width / unit, step = gridDim.y * blockDim.x;
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < num_heads * units; i += step) body(i / units, i % units * unit);
}

}  // namespace

KERNEL(store_latents, 128)
(bf16* __restrict__ keys, const float* __restrict__ kv, const float* __restrict__ weight, float eps,
 const float* __restrict__ angles, const u32* __restrict__ positions, const u32* __restrict__ slots, int latent_dim,
 int rotary_dim) {
    SHARED_ARRAY(float, sums, WARP_SIZE);
    const size_t row = blockIdx.x;
    const int key_dim = latent_dim + rotary_dim;
    const float* const x = kv + row * key_dim;
    float sum = 0.0f;
    for (int i = 2 * threadIdx.x; i < latent_dim; i += 2 * blockDim.x) {
        const float2 pair = load_pair(x + i);
        sum += pair.x * pair.x + pair.y * pair.y;
    }
    const float scale = 1.0f / sqrtf(block_sum(sum, sums) / latent_dim + eps);
    const u32 slot = slots[row];
    if (slot == NOWHERE) return;
    bf16* const key = keys + static_cast<size_t>(slot) * key_dim;
    for (int i = 2 * threadIdx.x; i < latent_dim; i += 2 * blockDim.x) {
        const float2 pair = load_pair(x + i);
        store_pair(key + i, make_float2(pair.x * scale * weight[i], pair.y * scale * weight[i + 1]));
    }
    const float* const row_angles = angles + static_cast<size_t>(positions[row]) * rotary_dim;
    for (int i = threadIdx.x; i < rotary_dim; i += blockDim.x) {
        key[latent_dim + i] = to_bf16(rotated(x + latent_dim, row_angles, rotary_dim / 2, i));
    }
}
EXPORT_KERNEL(store_latents)

KERNEL(split_queries, 256)
(bf16* __restrict__ by_heads, const float* __restrict__ q, int first, int num_heads, int all_heads, int content_dim,
 int query_dim) {
    const size_t row = blockIdx.x, num_rows = gridDim.x;
    for_each<1>(num_heads, content_dim, [&](int head, int i) {
        const float x = q[(row * all_heads + first + head) * query_dim + i];
        by_heads[(static_cast<size_t>(head) * num_rows + row) * content_dim + i] = to_bf16(x);
    });
}
EXPORT_KERNEL(split_queries)

KERNEL(rotate_queries, 256)
(bf16* __restrict__ keyed, const float* __restrict__ latents, const float* __restrict__ q,
 const float* __restrict__ angles, const u32* __restrict__ positions, int first, int num_heads, int all_heads,
 int content_dim, int latent_dim, int rotary_dim) {
    const size_t row = blockIdx.x, num_rows = gridDim.x;
    const int key_dim = latent_dim + rotary_dim;
    const float* const row_angles = angles + static_cast<size_t>(positions[row]) * rotary_dim;
    for_each<2>(num_heads, key_dim, [&](int head, int i) {
        float2 pair;
        if (i < latent_dim) {
            pair = load_pair(latents + (static_cast<size_t>(head) * num_rows + row) * latent_dim + i);
        } else {
            const int query_dim = content_dim + rotary_dim;
            const float* const rotary = q + (row * all_heads + first + head) * query_dim + content_dim;
            pair.x = rotated(rotary, row_angles, rotary_dim / 2, i - latent_dim);
            pair.y = rotated(rotary, row_angles, rotary_dim / 2, i - latent_dim + 1);
        }
        store_pair(keyed + (row * num_heads + head) * key_dim + i, pair);
    });
}
EXPORT_KERNEL(rotate_queries)

KERNEL(split_attended, 256)
(bf16* __restrict__ by_heads, const bf16* __restrict__ attended, int num_heads, int width) {
    const size_t row = blockIdx.x, num_rows = gridDim.x;
    for_each<2>(num_heads, width, [&](int head, int i) {
        const u32* const from = reinterpret_cast<const u32*>(attended + (row * num_heads + head) * width + i);
        *reinterpret_cast<u32*>(by_heads + (static_cast<size_t>(head) * num_rows + row) * width + i) = *from;
    });
}
EXPORT_KERNEL(split_attended)

KERNEL(join_values, 256)
(bf16* __restrict__ out, const float* __restrict__ values, int first, int num_heads, int all_heads, int width) {
    const size_t row = blockIdx.x, num_rows = gridDim.x;
    for_each<1>(num_heads, width, [&](int head, int i) {
        const float x = values[(static_cast<size_t>(head) * num_rows + row) * width + i];
        out[(row * all_heads + first + head) * width + i] = to_bf16(x);
    });
}
EXPORT_KERNEL(join_values)

KERNEL(tile_heads, 128)(uint4* __restrict__ tiles, int first, int num_rows, int tile_rows) {
    const int head = blockIdx.x, num_tiles = (num_rows + tile_rows - 1) / tile_rows;
    for (int i = threadIdx.x; i < num_tiles; i += blockDim.x) {
        const int row = i * tile_rows;
        tiles[head * num_tiles + i] = make_uint4(first + head, head * num_rows + row, min(tile_rows, num_rows - row), 0);
    }
}
EXPORT_KERNEL(tile_heads)
