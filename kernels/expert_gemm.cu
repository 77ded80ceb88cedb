// Products of the experts' weights with the rows that have chosen them:
//
//   expert_gate_up_m8, _m16, _m32, _m64    inner[place] = activation(gate) * up, of row sorted[place] of x, or
//                                          activation(up), if experts have no gates
//   expert_down_m8, _m16, _m32, _m64       sums[place] = inner[place] * W^T + bias
//
//   for tiles of up to 8, 16, 32 and 64 places; all give the same bits
//
//   x [num_rows][k] bf16    inner [num_places][inner_size] bf16    sums [num_places][n] f32    sorted, tiles: sort_experts.cu
//   weights of gate_up [num_experts][2 * inner_size][k] bf16, all rows of gate in front of the rows of up
//   weights of down [num_experts][n][k] bf16
//   bias [num_experts][2 * inner_size] and [num_experts][n] f32, or null; without gates half of gate_up and of its bias
//
// Grid (ceil(outputs / outputs of a block), num_tiles), blocks of 4 warps. A warp has 16 outputs of one tile's expert:
// of gate_up those of gate and of up, without gates and of down_m64 32. A block whose tile is empty ends at once, so
// that weights of experts without rows are not read. The others are read once for each tile, 2 bytes a weight:
//
//   few rows     each lane has DEPTH times 32 or 64 bytes of weights on the way; x comes from the L1 cache
//   many rows    64 rows and 128 rows of weights take 12 KiB from the L2 cache for 2^19 operations of a step of 32 columns
//
// The weights are the tensor cores' first operand, so that the second one has as few as 8 rows of x. The columns of a
// step come in an order in which a lane reads 16 bytes of each row: a sum has one order, which depends on k alone. No
// shared memory. Not measured yet.
#include "activations.cuh"
#include "tensor_cores.cuh"

namespace {

constexpr int BLOCK_WARPS = 4;
// Outputs of a row tile.
constexpr int TILE_OUTPUTS = 16;
// Columns that are multiplied at a time.
constexpr int STEP = 32;

// Sums of `num_row_tiles` of 16 outputs by `num_columns` of 8 rows of x. Lane l, with g = l / 4 and t = l % 4, has
// the sums of outputs g and g + 8 for rows 2t and 2t + 1.
template <int num_row_tiles, int num_columns>
struct Product {
    float sums[num_row_tiles][num_columns][4] = {};

    // The lane's rows of weights are g and g + 8 of each row tile. `rows` are those of x for places 8i + g of the tile,
    // or NOWHERE; `num_rows` is the number of places of all lanes.
    __device__ __forceinline__ void multiply(const bf16* const (&weights)[num_row_tiles][2], const bf16* x,
                                             const u32 (&rows)[num_columns], int num_rows, int k) {
        constexpr int DEPTH = num_columns < 8 ? 4 : 2;
        const int first_column = VECTOR * (threadIdx.x % 4), num_steps = (k + STEP - 1) / STEP;
        uint4 ahead[DEPTH][num_row_tiles][2];
        const auto load_weights = [&](uint4 (&to)[num_row_tiles][2], int step) {
#pragma unroll
            for (int tile = 0; tile < num_row_tiles; ++tile) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    to[tile][half] = load_8_or_zeros(weights[tile][half], true, first_column + step * STEP, k);
                }
            }
        };
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            if (i < num_steps) load_weights(ahead[i], i);
        }
        for (int first = 0; first < num_steps; first += DEPTH) {
#pragma unroll
            for (int i = 0; i < DEPTH; ++i) {
                const int step = first + i;
                if (step < num_steps) {
                    uint4 now[num_row_tiles][2];
#pragma unroll
                    for (int tile = 0; tile < num_row_tiles; ++tile) now[tile][0] = ahead[i][tile][0], now[tile][1] = ahead[i][tile][1];
                    if (step + DEPTH < num_steps) load_weights(ahead[i], step + DEPTH);
                    add_step(now, x, rows, num_rows, first_column + step * STEP, k);
                }
            }
        }
    }

    __device__ __forceinline__ void add_step(const uint4 (&weights)[num_row_tiles][2], const bf16* x,
                                             const u32 (&rows)[num_columns], int num_rows, int column, int k) {
        // Loads on the way at once: more take registers that there are not.
        constexpr int LOADED = num_columns < 4 ? num_columns : 4;
#pragma unroll
        for (int first = 0; first < num_columns; first += LOADED) {
            uint4 words[LOADED];
#pragma unroll
            for (int i = 0; i < LOADED; ++i) {
                const u32 row = rows[first + i];
                words[i] = load_8_or_zeros(x + static_cast<size_t>(row) * k, row != NOWHERE, column, k);
            }
#pragma unroll
            for (int i = 0; i < LOADED; ++i) {
                if (8 * (first + i) < num_rows) {
#pragma unroll
                    for (int tile = 0; tile < num_row_tiles; ++tile) {
                        const uint4 low = weights[tile][0], high = weights[tile][1];
                        float(&to)[4] = sums[tile][first + i];
                        mma_bf16(to, {low.x, high.x, low.y, high.y}, {words[i].x, words[i].y});
                        mma_bf16(to, {low.z, high.z, low.w, high.w}, {words[i].z, words[i].w});
                    }
                }
            }
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
                                        const uint4* __restrict__ tiles, const bf16* __restrict__ weights,
                                        const float* __restrict__ bias, int inner_size, int k, int gating, float alpha,
                                        float limit) {
    const uint4 tile = tiles[blockIdx.y];
    const int num_rows = tile.z, warp = threadIdx.x / WARP_SIZE, g = threadIdx.x % WARP_SIZE / 4;
    const bool has_gate = gating < WITHOUT_GATES;
    const int first_output = (blockIdx.x * BLOCK_WARPS + warp) * (has_gate ? 1 : 2) * TILE_OUTPUTS;
    if (num_rows == 0 || first_output >= inner_size) return;
    const u32 first_row = tile.x * (has_gate ? 2 : 1) * inner_size;
    const bf16* of_weights[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        // Beyond the last output it is that one again: the result is not stored.
        const int output = min(first_output + g + 8 * half, inner_size - 1);
        const int other = has_gate ? inner_size + output : min(first_output + TILE_OUTPUTS + g + 8 * half, inner_size - 1);
        of_weights[0][half] = weights + static_cast<size_t>(first_row + output) * k;
        of_weights[1][half] = weights + static_cast<size_t>(first_row + other) * k;
    }
    u32 rows[num_columns];
#pragma unroll
    for (int i = 0; i < num_columns; ++i) {
        const int place = 8 * i + g;
        rows[i] = place < num_rows ? sorted[tile.y + place] : NOWHERE;
    }
    Product<2, num_columns> product;
    product.multiply(of_weights, x, rows, num_rows, k);
    product.for_each(num_rows, [&](int at, int row, int i, int j) {
        const int output = first_output + at;
        if (output >= inner_size) return;
        bf16* const to = inner + static_cast<size_t>(tile.y + row) * inner_size + output;
        float first = product.sums[0][i][j], second = product.sums[1][i][j];
        if (gating < WITHOUT_GATES) {
            if (bias != nullptr) first += bias[first_row + output], second += bias[first_row + inner_size + output];
            *to = to_bf16(gated(gating, first, second, alpha, limit));
            return;
        }
        if (bias != nullptr) first += bias[first_row + output];
        *to = to_bf16(without_gate(gating, first));
        if (output + TILE_OUTPUTS >= inner_size) return;
        if (bias != nullptr) second += bias[first_row + output + TILE_OUTPUTS];
        to[TILE_OUTPUTS] = to_bf16(without_gate(gating, second));
    });
}

template <int num_row_tiles, int num_columns>
__device__ __forceinline__ void down(float* __restrict__ sums, const bf16* __restrict__ inner,
                                     const uint4* __restrict__ tiles, const bf16* __restrict__ weights,
                                     const float* __restrict__ bias, int n, int k) {
    const uint4 tile = tiles[blockIdx.y];
    const int num_rows = tile.z, warp = threadIdx.x / WARP_SIZE, g = threadIdx.x % WARP_SIZE / 4;
    const int first_output = (blockIdx.x * BLOCK_WARPS + warp) * num_row_tiles * TILE_OUTPUTS;
    if (num_rows == 0 || first_output >= n) return;
    const size_t first_row = static_cast<size_t>(tile.x) * n;
    const bf16* of_weights[num_row_tiles][2];
#pragma unroll
    for (int i = 0; i < 2 * num_row_tiles; ++i) {
        of_weights[i / 2][i % 2] = weights + (first_row + min(first_output + g + 8 * i, n - 1)) * k;
    }
    u32 rows[num_columns];
#pragma unroll
    for (int i = 0; i < num_columns; ++i) {
        const int place = 8 * i + g;
        rows[i] = place < num_rows ? tile.y + place : NOWHERE;
    }
    Product<num_row_tiles, num_columns> product;
    product.multiply(of_weights, inner, rows, num_rows, k);
    product.for_each(num_rows, [&](int at, int row, int i, int j) {
#pragma unroll
        for (int tile_row = 0; tile_row < num_row_tiles; ++tile_row) {
            const int output = first_output + tile_row * TILE_OUTPUTS + at;
            if (output >= n) return;
            const float sum = product.sums[tile_row][i][j];
            sums[static_cast<size_t>(tile.y + row) * n + output] = bias != nullptr ? sum + bias[first_row + output] : sum;
        }
    });
}

}  // namespace

#define EXPERT_GATE_UP(name, num_columns)                                                                             \
    KERNEL(name, 32 * BLOCK_WARPS)                                                                                    \
    (bf16* inner, const bf16* x, const u32* sorted, const uint4* tiles, const bf16* weights, const float* bias,       \
     int inner_size, int k, int gating, float alpha, float limit) {                                                   \
        gate_up<num_columns>(inner, x, sorted, tiles, weights, bias, inner_size, k, gating, alpha, limit);            \
    }                                                                                                                 \
    EXPORT_KERNEL(name)

#define EXPERT_DOWN(name, num_row_tiles, num_columns)                                                                 \
    KERNEL(name, 32 * BLOCK_WARPS)                                                                                    \
    (float* sums, const bf16* inner, const uint4* tiles, const bf16* weights, const float* bias, int n, int k) {      \
        down<num_row_tiles, num_columns>(sums, inner, tiles, weights, bias, n, k);                                    \
    }                                                                                                                 \
    EXPORT_KERNEL(name)

EXPERT_GATE_UP(expert_gate_up_m8, 1)
EXPERT_GATE_UP(expert_gate_up_m16, 2)
EXPERT_GATE_UP(expert_gate_up_m32, 4)
EXPERT_GATE_UP(expert_gate_up_m64, 8)
EXPERT_DOWN(expert_down_m8, 1, 1)
EXPERT_DOWN(expert_down_m16, 1, 2)
EXPERT_DOWN(expert_down_m32, 1, 4)
EXPERT_DOWN(expert_down_m64, 2, 8)
