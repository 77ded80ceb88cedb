// Adapters (LoRA; Hu et al., arXiv:2106.09685): out += scale * (x * A^T) * B^T, for the rows that have one; with
// factors of the outputs (DoRA; Liu et al., arXiv:2402.09353), out = (out + that) * factors. Rows with different
// adapters are computed in one launch, by segments, as Punica does it (Chen et al., arXiv:2310.18547).
//
//   low_rank_shrink    shrunk[row][part] = scale * (x[row] * A^T)
//   low_rank_expand    out[row] += shrunk[row][part] * B^T, for the outputs of the part
//   low_rank_take      before a product that is added: if there are factors, saved[row] = out[row], out[row] = 0
//   low_rank_finish    if there are factors, out[row] = out[row] * factors + saved[row]; if there is a bias, out[row] += bias
//   low_rank_embed     shrunk[row][0] = embedding_scale * scale * A^T[token of the row]; if there is a replacement, out[row] =
//                      embedding_scale * replacement[token of the row]. A and the replacement have num_tokens tokens from first_token
//                      on; for others shrunk is 0, and out stays as it is
//   low_rank_replace   if there is a replacement, out[row] = x[row] * replacement^T
//
//   x [...][num_inputs] bf16    out, saved [...][width] f32; saved is null for a product that is stored
//   shrunk [...][MAX_PARTS][max_rank] f32, max_rank a multiple of 16
//   tiles [num_tiles]           1 to MAX_ROWS neighbouring rows with the same adapter
//   adapters                    the memory of all adapters: for each a table of places, and weights at multiples of 16 bytes
//
//   table    [num_places]; a place is a projection. Its parts have outputs of their own; one of rank 0 is none
//   A        [ceil(rank / 16)][num_inputs][16] bf16     panels of 16 ranks; those beyond the rank are 0
//   B        [ceil(num_outputs / 64)][rank][64] bf16    panels of 64 outputs
//   factors, bias [width] f32, replacement [vocab_size][hidden_size] bf16, at offset 0 if there are none
//   token_ids, sampled    as in embed.cu
//
// Grid of the shrink (num_tiles, MAX_PARTS * ceil(largest rank / 16)), of the expand (num_tiles, MAX_PARTS * ceil(most
// outputs / (2 * threads))); blocks for which a part has no panel or outputs end at once. A thread of the shrink adds
// up 8 ranks over every (threads / 2)-th input, then lanes and warps are added in a fixed order: launch it with the
// same number of threads always. A thread of the expand has two outputs, and adds up the ranks in ascending order. So a
// row has the same bits in any tile. Reads the weights once a tile, 2 bytes each, mostly from memory in generation and
// from the L2 cache for the rows of a context. The shrink takes 2 KiB of shared memory and 62 registers, so that an SM
// holds 4 blocks; with fewer, which the compiler chooses if it may, it spills. Grid of the others (num_tiles, n), any
// n: the blocks share the elements of the rows; take moves 12 bytes per element, finish 12 and reads vectors from the
// L2 cache. Grid of replace (num_tiles, n), any n:
// a warp computes an output of all rows of the tile, and the warps of the blocks share the outputs; it reads the
// replacement once a tile. Not measured yet.
#include "common.cuh"

// Not unnamed: the compiler would put its process id into the names of the constants.
namespace low_rank {

constexpr int MAX_PARTS = 3, MAX_ROWS = 4;
constexpr int RANK_PANEL = 16, OUTPUT_PANEL = 64;
constexpr int MAX_SHRINK_THREADS = 256;

// Offsets are those of bytes in `adapters`. The first bytes there are no weights: 0 says that there are none.
struct Part {
    u64 a, b;
    u32 rank, num_inputs, first_output, num_outputs;
    float scale;
    u32 padding;
};

struct Place {
    Part parts[MAX_PARTS];
    u64 factors, bias, replacement;
};

struct Tile {
    u64 table;
    u32 first_row, num_rows;
};

__device__ __forceinline__ const Place& place_of(const u8* adapters, const Tile& tile, int place) {
    return reinterpret_cast<const Place*>(adapters + tile.table)[place];
}

// The part that a block of the shrink or of the expand computes.
__device__ __forceinline__ Part part_of(const u8* adapters, const Tile& tile, int place) {
    return place_of(adapters, tile, place).parts[blockIdx.y % MAX_PARTS];
}

// Where the shrunk row of this block's part is.
__device__ __forceinline__ size_t shrunk_row(u32 row, int max_rank) {
    return (static_cast<size_t>(row) * MAX_PARTS + blockIdx.y % MAX_PARTS) * max_rank;
}

}  // namespace low_rank

using namespace low_rank;

KERNEL(low_rank_shrink, MAX_SHRINK_THREADS, 2)
(float* __restrict__ shrunk, const bf16* __restrict__ x, const u8* __restrict__ adapters, const Tile* __restrict__ tiles, int place,
 int max_rank) {
    SHARED_ARRAY(float, of_warps, MAX_SHRINK_THREADS / WARP_SIZE * MAX_ROWS * RANK_PANEL);
    const Tile tile = tiles[blockIdx.x];
    const Part part = part_of(adapters, tile, place);
    const u32 first_rank = blockIdx.y / MAX_PARTS * RANK_PANEL;
    if (first_rank >= part.rank) return;
    const size_t num_inputs = part.num_inputs;
    const bf16* const a = reinterpret_cast<const bf16*>(adapters + part.a) + first_rank * num_inputs;
    const bf16* const rows = x + tile.first_row * num_inputs;
    // Even threads have the first half of the panel, odd ones the second.
    const int half = threadIdx.x % 2 * VECTOR;
    float sums[MAX_ROWS][VECTOR] = {};
    for (size_t i = threadIdx.x / 2; i < num_inputs; i += blockDim.x / 2) {
        float weights[VECTOR];
        load_8(weights, a + i * RANK_PANEL + half);
#pragma unroll
        for (int r = 0; r < MAX_ROWS; ++r) {
            if (r < static_cast<int>(tile.num_rows)) {
                const float input = to_float(rows[r * num_inputs + i]);
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) sums[r][j] += input * weights[j];
            }
        }
    }
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int r = 0; r < MAX_ROWS; ++r) {
        if (r >= static_cast<int>(tile.num_rows)) continue;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
#pragma unroll
            for (int distance = WARP_SIZE / 2; distance > 1; distance /= 2) {
                sums[r][j] += __shfl_xor_sync(ALL_LANES, sums[r][j], distance);
            }
        }
        if (lane < 2) store_8(of_warps + (warp * MAX_ROWS + r) * RANK_PANEL + half, sums[r]);
    }
    __syncthreads();
    const int num_warps = blockDim.x / WARP_SIZE;
    for (int i = threadIdx.x; i < static_cast<int>(tile.num_rows) * RANK_PANEL; i += blockDim.x) {
        float sum = 0.0f;
        for (int w = 0; w < num_warps; ++w) sum += of_warps[w * MAX_ROWS * RANK_PANEL + i];
        const int r = i / RANK_PANEL, rank = i % RANK_PANEL;
        shrunk[shrunk_row(tile.first_row + r, max_rank) + first_rank + rank] = part.scale * sum;
    }
}
EXPORT_KERNEL(low_rank_shrink)

KERNEL(low_rank_expand, 128)
(float* __restrict__ out, const float* __restrict__ shrunk, const u8* __restrict__ adapters, const Tile* __restrict__ tiles, int place,
 int max_rank, int width) {
    const Tile tile = tiles[blockIdx.x];
    const Part part = part_of(adapters, tile, place);
    const u32 output = 2 * (blockIdx.y / MAX_PARTS * blockDim.x + threadIdx.x);
    if (part.rank == 0 || output >= part.num_outputs) return;
    const bf16* const b = reinterpret_cast<const bf16*>(adapters + part.b) +
                          static_cast<size_t>(output / OUTPUT_PANEL) * part.rank * OUTPUT_PANEL + output % OUTPUT_PANEL;
    const float* const from = shrunk + shrunk_row(tile.first_row, max_rank);
    float sums[MAX_ROWS][2] = {};
    for (u32 rank = 0; rank < part.rank; ++rank) {
        const u32 pair = *reinterpret_cast<const u32*>(b + static_cast<size_t>(rank) * OUTPUT_PANEL);
        const float weights[2] = {low_float(pair), high_float(pair)};
#pragma unroll
        for (int r = 0; r < MAX_ROWS; ++r) {
            if (r < static_cast<int>(tile.num_rows)) {
                const float x = from[static_cast<size_t>(r) * MAX_PARTS * max_rank + rank];
                sums[r][0] += x * weights[0];
                sums[r][1] += x * weights[1];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < MAX_ROWS; ++r) {
        if (r < static_cast<int>(tile.num_rows)) {
            float* const to = out + static_cast<size_t>(tile.first_row + r) * width + part.first_output + output;
            to[0] += sums[r][0];
            if (output + 1 < part.num_outputs) to[1] += sums[r][1];
        }
    }
}
EXPORT_KERNEL(low_rank_expand)

KERNEL(low_rank_take, 256)
(float* __restrict__ out, float* __restrict__ saved, const u8* __restrict__ adapters, const Tile* __restrict__ tiles, int place,
 int width) {
    const Tile tile = tiles[blockIdx.x];
    if (place_of(adapters, tile, place).factors == 0) return;
    const size_t start = static_cast<size_t>(tile.first_row) * width, len = static_cast<size_t>(tile.num_rows) * width;
    for (size_t i = blockIdx.y * blockDim.x + threadIdx.x; i < len; i += gridDim.y * blockDim.x) {
        saved[start + i] = out[start + i];
        out[start + i] = 0.0f;
    }
}
EXPORT_KERNEL(low_rank_take)

KERNEL(low_rank_finish, 256)
(float* __restrict__ out, const float* __restrict__ saved, const u8* __restrict__ adapters, const Tile* __restrict__ tiles, int place,
 int width) {
    const Tile tile = tiles[blockIdx.x];
    const Place& changed = place_of(adapters, tile, place);
    const bool has_factors = changed.factors != 0, has_bias = changed.bias != 0;
    if (!has_factors && !has_bias) return;
    const float* const factors = reinterpret_cast<const float*>(adapters + changed.factors);
    const float* const bias = reinterpret_cast<const float*>(adapters + changed.bias);
    const size_t start = static_cast<size_t>(tile.first_row) * width, len = static_cast<size_t>(tile.num_rows) * width;
    for (size_t i = blockIdx.y * blockDim.x + threadIdx.x; i < len; i += gridDim.y * blockDim.x) {
        const size_t output = i % width;
        float sum = out[start + i];
        if (has_factors) sum = sum * factors[output] + (saved ? saved[start + i] : 0.0f);
        if (has_bias) sum += bias[output];
        out[start + i] = sum;
    }
}
EXPORT_KERNEL(low_rank_finish)

KERNEL(low_rank_embed, 256)
(float* __restrict__ out, float* __restrict__ shrunk, const u8* __restrict__ adapters, const Tile* __restrict__ tiles, int place,
 const u32* __restrict__ token_ids, const u32* __restrict__ sampled, int first_token, int num_tokens, float embedding_scale, int max_rank,
 int width) {
    const Tile tile = tiles[blockIdx.x];
    const Place& changed = place_of(adapters, tile, place);
    const Part& part = changed.parts[0];
    const bf16* const a = reinterpret_cast<const bf16*>(adapters + part.a);
    const bf16* const replacement = reinterpret_cast<const bf16*>(adapters + changed.replacement);
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    for (u32 row = tile.first_row; row < tile.first_row + tile.num_rows; ++row) {
        const u32 token = token_of(token_ids[row], sampled) - static_cast<u32>(first_token);
        // Other ranks have the others.
        const bool is_own = token < static_cast<u32>(num_tokens);
        float* const of_row = shrunk + static_cast<size_t>(row) * MAX_PARTS * max_rank;
        for (int rank = first; rank < static_cast<int>(part.rank); rank += step) {
            const size_t panel = static_cast<size_t>(rank / RANK_PANEL) * part.num_inputs;
            const float weight = is_own ? to_float(a[(panel + token) * RANK_PANEL + rank % RANK_PANEL]) : 0.0f;
            of_row[rank] = embedding_scale * part.scale * weight;
        }
        if (changed.replacement == 0 || !is_own) continue;
        float* const to = out + static_cast<size_t>(row) * width;
        for (int i = first; i < width; i += step) to[i] = embedding_scale * to_float(replacement[static_cast<size_t>(token) * width + i]);
    }
}
EXPORT_KERNEL(low_rank_embed)

KERNEL(low_rank_replace, 128)
(float* __restrict__ out, const bf16* __restrict__ x, const u8* __restrict__ adapters, const Tile* __restrict__ tiles, int place,
 int num_inputs, int width) {
    const Tile tile = tiles[blockIdx.x];
    const u64 replacement = place_of(adapters, tile, place).replacement;
    if (replacement == 0) return;
    const bf16* const weights = reinterpret_cast<const bf16*>(adapters + replacement);
    const bf16* const rows = x + static_cast<size_t>(tile.first_row) * num_inputs;
    const int num_warps = blockDim.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    for (int output = blockIdx.y * num_warps + threadIdx.x / WARP_SIZE; output < width; output += gridDim.y * num_warps) {
        const bf16* const of_output = weights + static_cast<size_t>(output) * num_inputs;
        float sums[MAX_ROWS] = {};
        for (int i = lane; i < num_inputs; i += WARP_SIZE) {
            const float weight = to_float(of_output[i]);
#pragma unroll
            for (int r = 0; r < MAX_ROWS; ++r) {
                if (r < static_cast<int>(tile.num_rows)) sums[r] += to_float(rows[static_cast<size_t>(r) * num_inputs + i]) * weight;
            }
        }
#pragma unroll
        for (int r = 0; r < MAX_ROWS; ++r) {
            if (r >= static_cast<int>(tile.num_rows)) continue;
            const float sum = warp_sum(sums[r]);
            if (lane == 0) out[static_cast<size_t>(tile.first_row + r) * width + output] = sum;
        }
    }
}
EXPORT_KERNEL(low_rank_replace)
