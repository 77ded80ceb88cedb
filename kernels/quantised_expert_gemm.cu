// Products of the experts' quantised weights with the rows that have chosen them:
//
//   quantised_expert_gate_up_m8, _m32    inner[place] = activation(gate) * up, of row sorted[place] of x, or activation(up),
//                                        if experts have no gates
//   quantised_expert_down_m8, _m32       sums[place] = inner[place] * W^T + bias
//
//   for tiles of up to 8 and 32 places; both give the same bits
//
//   x, inner, sums, sorted, tiles, bias: as in expert_gemm.cu
//   codes, scales, offsets: as quantised.cuh says; offsets may be null. The gate, up and down of each expert begin with
//   a row tile: tile_rows(n) = ceil(n / 16) of them, [num_experts][2][tile_rows(inner_size)] and
//   [num_experts][tile_rows(n)]; without gates [num_experts][tile_rows(inner_size)] of up
//   kind: 0 int4, 1 int8, 2 e4m3, 3 e2m1
//
// Grid (ceil(outputs / outputs of a block), num_tiles), blocks of 4 warps. A warp has two row tiles of one tile's
// expert: of gate_up the same outputs of gate and of up, 16 of each, and 32 outputs of down, or of up without gates. A
// block whose tile is empty ends at once, so that weights of experts without rows are not read. The others are read
// once for each tile, bits / 8 bytes a weight and 2 bytes a row and group. Codes become bf16 in registers, exactly, as
// in quantised_gemm.cu: sums of a group are multiplied by its scale. A sum has one order, which depends on k and the
// groups alone. The kind is an argument, as a warp never diverges by it. No shared memory. Not measured yet.
#include "activations.cuh"
#include "quantised.cuh"

namespace {

using namespace quantised;

constexpr int BLOCK_WARPS = 4;
// Row tiles of a warp.
constexpr int ROW_TILES = 2;

// Matrices of all experts.
struct Weights {
    CodeKind kind;
    const uint4* codes;
    const u16* scales;
    const u16* offsets;
    int k, group_size;

    __device__ __forceinline__ int halves_of_tile() const {
        return kind == CodeKind::INT4 || kind == CodeKind::E2M1 ? 2 : 1;
    }

    // The lane's codes of 32 columns of a row tile, and of those beside them in the tile.
    __device__ __forceinline__ uint4 load_codes(int row_tile, int half) const {
        const int num_halves = (k + HALF_COLUMNS - 1) / HALF_COLUMNS, halves = halves_of_tile();
        const size_t num_tiles = (num_halves + halves - 1) / halves;
        return codes[(row_tile * num_tiles + half / halves) * WARP_SIZE + threadIdx.x % WARP_SIZE];
    }

    // The numbers of the lane's two rows in a group.
    __device__ __forceinline__ void load_pair(float (&to)[2], const u16* from, int row_tile, int group) const {
        const int num_groups = (k + group_size - 1) / group_size, g = threadIdx.x % WARP_SIZE / 4;
        from += (static_cast<size_t>(row_tile) * num_groups + group) * TILE_ROWS + g;
        to[0] = from_half(from[0]);
        to[1] = from_half(from[8]);
    }

    __device__ __forceinline__ void unpack_codes(u32 (&a)[4], const uint4& words, int half, int step) const {
        switch (kind) {
            case CodeKind::INT4: unpack<CodeKind::INT4>(a, words, half % 2, step); break;
            case CodeKind::INT8: unpack<CodeKind::INT8>(a, words, 0, step); break;
            case CodeKind::FP8: unpack<CodeKind::FP8>(a, words, 0, step); break;
            default: unpack<CodeKind::E2M1>(a, words, half % 2, step);
        }
    }
};

// Sums of two row tiles by `num_columns` of 8 rows of x, laid out as those of expert_gemm.cu.
template <int num_columns>
struct Product {
    float sums[ROW_TILES][num_columns][4] = {};
    float of_group[ROW_TILES][num_columns][4] = {};
    // Sums of the group's activations.
    float x_sums[num_columns][4] = {};

    // `rows` are those of x for places 8i + g of the tile, or NOWHERE.
    __device__ __forceinline__ void multiply(const Weights& weights, const int (&row_tiles)[ROW_TILES], const bf16* x,
                                             const u32 (&rows)[num_columns]) {
        const int k = weights.k, num_halves = (k + HALF_COLUMNS - 1) / HALF_COLUMNS;
        uint4 ahead[ROW_TILES];
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) ahead[tile] = weights.load_codes(row_tiles[tile], 0);
#pragma unroll 1
        for (int half = 0; half < num_halves; ++half) {
            uint4 now[ROW_TILES];
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                now[tile] = ahead[tile];
                if (half + 1 < num_halves) ahead[tile] = weights.load_codes(row_tiles[tile], half + 1);
            }
            add_half(weights, now, half, x, rows);
            const int next = (half + 1) * HALF_COLUMNS;
            if (next % weights.group_size == 0 || next >= k) end_group(weights, row_tiles, half * HALF_COLUMNS / weights.group_size);
        }
    }

    // Adds the products of 32 columns.
    __device__ __forceinline__ void add_half(const Weights& weights, const uint4 (&codes)[ROW_TILES], int half, const bf16* x,
                                             const u32 (&rows)[num_columns]) {
        const int k = weights.k, column = half * HALF_COLUMNS + VECTOR * (threadIdx.x % 4);
        uint4 words[num_columns];
#pragma unroll
        for (int i = 0; i < num_columns; ++i) {
            words[i] = load_8_or_zeros(x + static_cast<size_t>(rows[i]) * k, rows[i] != NOWHERE, column, k);
        }
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            u32 a[ROW_TILES][4];
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) weights.unpack_codes(a[tile], codes[tile], half, step);
#pragma unroll
            for (int i = 0; i < num_columns; ++i) {
                const u32 b[2] = {step == 0 ? words[i].x : words[i].z, step == 0 ? words[i].y : words[i].w};
#pragma unroll
                for (int tile = 0; tile < ROW_TILES; ++tile) mma_bf16(of_group[tile][i], a[tile], b);
                if (weights.offsets != nullptr) {
                    constexpr u32 ONES = 0x3f803f80u;
                    mma_bf16(x_sums[i], {ONES, ONES, ONES, ONES}, b);
                }
            }
        }
    }

    __device__ __forceinline__ void end_group(const Weights& weights, const int (&row_tiles)[ROW_TILES], int group) {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            float scale[2], offset[2] = {};
            weights.load_pair(scale, weights.scales, row_tiles[tile], group);
            if (weights.offsets != nullptr) weights.load_pair(offset, weights.offsets, row_tiles[tile], group);
#pragma unroll
            for (int i = 0; i < num_columns; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    sums[tile][i][j] += scale[j / 2] * of_group[tile][i][j] + offset[j / 2] * x_sums[i][j];
                    of_group[tile][i][j] = 0.0f;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < num_columns; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) x_sums[i][j] = 0.0f;
        }
    }

    // Calls `store(output, row, i, j)` for each output of a row tile and each row: its sums are sums[..][i][j].
    template <class Store>
    __device__ __forceinline__ void for_each(int num_rows, Store store) const {
        const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < num_columns; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int row = 8 * i + 2 * t + j % 2;
                if (row < num_rows) store(g + j / 2 * 8, row, i, j);
            }
        }
    }
};

template <int num_columns>
__device__ __forceinline__ void gate_up(bf16* __restrict__ inner, const bf16* __restrict__ x, const u32* __restrict__ sorted,
                                        const uint4* __restrict__ tiles, const Weights& weights, const float* __restrict__ bias,
                                        int inner_size, int gating, float alpha, float limit) {
    const uint4 tile = tiles[blockIdx.y];
    const int num_rows = tile.z, expert = tile.x, warp = threadIdx.x / WARP_SIZE, g = threadIdx.x % WARP_SIZE / 4;
    const bool has_gate = gating < WITHOUT_GATES;
    const int row_tile = (blockIdx.x * BLOCK_WARPS + warp) * (has_gate ? 1 : 2);
    const int num_row_tiles = (inner_size + TILE_ROWS - 1) / TILE_ROWS;
    if (num_rows == 0 || row_tile >= num_row_tiles) return;
    const int of_expert = (has_gate ? 2 : 1) * expert * num_row_tiles, first_tile = of_expert + row_tile;
    // Without gates, beyond the last row tile it is that one again: its results are not stored.
    const int second_tile = has_gate ? first_tile + num_row_tiles : of_expert + min(row_tile + 1, num_row_tiles - 1);
    u32 rows[num_columns];
#pragma unroll
    for (int i = 0; i < num_columns; ++i) {
        const int place = 8 * i + g;
        rows[i] = place < num_rows ? sorted[tile.y + place] : NOWHERE;
    }
    Product<num_columns> product;
    product.multiply(weights, {first_tile, second_tile}, x, rows);
    const size_t first_row = static_cast<size_t>(expert) * (has_gate ? 2 : 1) * inner_size;
    product.for_each(num_rows, [&](int at, int row, int i, int j) {
        const int output = row_tile * TILE_ROWS + at;
        if (output >= inner_size) return;
        bf16* const to = inner + static_cast<size_t>(tile.y + row) * inner_size + output;
        float first = product.sums[0][i][j], second = product.sums[1][i][j];
        const int other = output + (has_gate ? inner_size : TILE_ROWS);
        const bool has_second = has_gate || other < inner_size;
        if (bias != nullptr) first += bias[first_row + output], second += has_second ? bias[first_row + other] : 0.0f;
        if (has_gate) {
            *to = to_bf16(gated(gating, first, second, alpha, limit));
        } else {
            *to = to_bf16(without_gate(gating, first));
            if (has_second) to[TILE_ROWS] = to_bf16(without_gate(gating, second));
        }
    });
}

template <int num_columns>
__device__ __forceinline__ void down(float* __restrict__ sums, const bf16* __restrict__ inner, const uint4* __restrict__ tiles,
                                     const Weights& weights, const float* __restrict__ bias, int n) {
    const uint4 tile = tiles[blockIdx.y];
    const int num_rows = tile.z, expert = tile.x, warp = threadIdx.x / WARP_SIZE, g = threadIdx.x % WARP_SIZE / 4;
    const int row_tile = (blockIdx.x * BLOCK_WARPS + warp) * ROW_TILES, num_row_tiles = (n + TILE_ROWS - 1) / TILE_ROWS;
    if (num_rows == 0 || row_tile >= num_row_tiles) return;
    const int first_tile = expert * num_row_tiles;
    u32 rows[num_columns];
#pragma unroll
    for (int i = 0; i < num_columns; ++i) {
        const int place = 8 * i + g;
        rows[i] = place < num_rows ? tile.y + place : NOWHERE;
    }
    Product<num_columns> product;
    // A second row tile beyond the last one is the last one again: its results are not stored.
    product.multiply(weights, {first_tile + row_tile, first_tile + min(row_tile + 1, num_row_tiles - 1)}, inner, rows);
    const size_t first_row = static_cast<size_t>(expert) * n;
    product.for_each(num_rows, [&](int at, int row, int i, int j) {
#pragma unroll
        for (int half = 0; half < ROW_TILES; ++half) {
            const int output = (row_tile + half) * TILE_ROWS + at;
            if (output >= n) return;
            const float sum = product.sums[half][i][j];
            sums[static_cast<size_t>(tile.y + row) * n + output] = bias != nullptr ? sum + bias[first_row + output] : sum;
        }
    });
}

}  // namespace

#define QUANTISED_EXPERT_GATE_UP(name, num_columns)                                                                   \
    KERNEL(name, 32 * BLOCK_WARPS)                                                                                    \
    (bf16* inner, const bf16* x, const u32* sorted, const uint4* tiles, int kind, const uint4* codes, const u16* scales, \
     const u16* offsets, const float* bias, int inner_size, int k, int group_size, int gating, float alpha, float limit) { \
        const Weights weights = {static_cast<CodeKind>(kind), codes, scales, offsets, k, group_size};                 \
        gate_up<num_columns>(inner, x, sorted, tiles, weights, bias, inner_size, gating, alpha, limit);               \
    }                                                                                                                 \
    EXPORT_KERNEL(name)

#define QUANTISED_EXPERT_DOWN(name, num_columns)                                                                      \
    KERNEL(name, 32 * BLOCK_WARPS)                                                                                    \
    (float* sums, const bf16* inner, const uint4* tiles, int kind, const uint4* codes, const u16* scales,             \
     const u16* offsets, const float* bias, int n, int k, int group_size) {                                           \
        const Weights weights = {static_cast<CodeKind>(kind), codes, scales, offsets, k, group_size};                 \
        down<num_columns>(sums, inner, tiles, weights, bias, n);                                                      \
    }                                                                                                                 \
    EXPORT_KERNEL(name)

QUANTISED_EXPERT_GATE_UP(quantised_expert_gate_up_m8, 1)
QUANTISED_EXPERT_GATE_UP(quantised_expert_gate_up_m32, 4)
QUANTISED_EXPERT_DOWN(quantised_expert_down_m8, 1)
QUANTISED_EXPERT_DOWN(quantised_expert_down_m32, 4)
