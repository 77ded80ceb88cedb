// Products with quantised weights for small batches, where reading the weights takes the time:
//
//   partials[split][row][i] = sum over the split's columns j of x[row][j] * (scale * code + offset)
//
//   gemm_int4_m8, _m16, _m32, _m64, gemm_int8_..., gemm_fp8_... and gemm_e2m1_...: 8, 16, 32, 64 rows of x
//   at once; all give equal bits
//
//   x [m][k] bf16    codes, scales, offsets: as quantised.cuh says; offsets may be null    partials [num_splits][m][n] f32
//
// As Marlin does (Frantar et al., arXiv:2408.11743), codes lie in memory as the tensor cores' operands, and become bf16
// in registers, exactly. Sums of a group are exact products of codes and activations, added up in f32; then they are
// multiplied by the group's scale. With offsets the tensor cores also add up the activations, as products with a matrix
// of ones.
//
// Grid (ceil(n / (16 * row tiles of a block)), num_splits, ceil(m / rows)), where a block has 8 warps, and a warp one
// row tile (_m64) or two, and the tiles of its split of k:
//
//           k: | split 0: tiles 0 .. t-1 | split 1: tiles t .. 2t-1 | ...
//   warp 0     | row tiles 0 and 1       |
//   warp 1     | row tiles 2 and 3       |
//
// Choose num_splits by n and k alone, so that the result does not depend on m: 256 blocks keep a large GPU busy.
// sum_splits adds up the splits.
//
// Reads codes once: bits / 8 bytes per weight and 2 bytes per row and group. Each lane has the codes of the next DEPTH
// tiles on the way, 128 bytes with two row tiles; x comes from the L1 cache, where the block's warps share it. No
// shared memory.
#include "quantised.cuh"

namespace {

using namespace quantised;

constexpr int BLOCK_WARPS = 8;
constexpr int DEPTH = 4;

// `num_row_tiles` of 16 outputs by `num_columns` of 8 rows of x.
template <int num_row_tiles, int num_columns>
struct Sums {
    float values[num_row_tiles][num_columns][4] = {};
};

template <CodeKind kind, int num_row_tiles, int num_columns>
struct Product {
    Sums<num_row_tiles, num_columns> group, total;
    // Sums of the group's activations.
    float x_sums[num_columns][4] = {};

    // Adds the products of 32 columns.
    __device__ __forceinline__ void add_half(const uint4 (&codes)[num_row_tiles], int half, const bf16* x, int first_row,
                                             int m, int column, int k, bool has_offsets) {
        const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
        uint4 words[num_columns];
#pragma unroll
        for (int i = 0; i < num_columns; ++i) {
            const int row = first_row + 8 * i + g;
            words[i] = load_8_or_zeros(x + static_cast<size_t>(row) * k, row < m, column + 8 * t, k);
        }
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            u32 a[num_row_tiles][4];
#pragma unroll
            for (int tile = 0; tile < num_row_tiles; ++tile) unpack<kind>(a[tile], codes[tile], half, step);
#pragma unroll
            for (int i = 0; i < num_columns; ++i) {
                const u32 b[2] = {step == 0 ? words[i].x : words[i].z, step == 0 ? words[i].y : words[i].w};
#pragma unroll
                for (int tile = 0; tile < num_row_tiles; ++tile) mma_bf16(group.values[tile][i], a[tile], b);
                if (has_offsets) {
                    constexpr u32 ONES = 0x3f803f80u;
                    mma_bf16(x_sums[i], {ONES, ONES, ONES, ONES}, b);
                }
            }
        }
    }

    // Ends a group: scales and offsets are those of the lane's rows g and g + 8.
    __device__ __forceinline__ void end_group(int tile, const float (&scales)[2], const float (&offsets)[2]) {
#pragma unroll
        for (int i = 0; i < num_columns; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                total.values[tile][i][j] += scales[j / 2] * group.values[tile][i][j] + offsets[j / 2] * x_sums[i][j];
                group.values[tile][i][j] = 0.0f;
            }
        }
    }

    __device__ __forceinline__ void clear_x_sums() {
#pragma unroll
        for (int i = 0; i < num_columns; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) x_sums[i][j] = 0.0f;
        }
    }
};

template <CodeKind kind, int num_row_tiles, int num_columns>
__device__ __forceinline__ void multiply(float* __restrict__ partials, const bf16* __restrict__ x,
                                         const uint4* __restrict__ codes, const u16* __restrict__ scales,
                                         const u16* __restrict__ offsets, int m, int n, int k, int group_size) {
    const Shape shape = {n, k, group_size};
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const int first_tile = (blockIdx.x * BLOCK_WARPS + warp) * num_row_tiles, last_tile = shape.num_row_tiles() - 1;
    if (first_tile > last_tile) return;
    const int first_row = blockIdx.z * 8 * num_columns;
    const int num_tiles = shape.num_column_tiles<kind>(), num_groups = shape.num_groups();
    const int begin = static_cast<int>(static_cast<u64>(num_tiles) * blockIdx.y / gridDim.y);
    const int end = static_cast<int>(static_cast<u64>(num_tiles) * (blockIdx.y + 1) / gridDim.y);

    // A second row tile beyond the last one is the last one again; its results are not stored.
    const auto row_tile = [&](int tile) { return min(first_tile + tile, last_tile); };
    const auto load_codes = [&](uint4 (&to)[num_row_tiles], int at) {
#pragma unroll
        for (int tile = 0; tile < num_row_tiles; ++tile) {
            to[tile] = codes[(static_cast<size_t>(row_tile(tile)) * num_tiles + at) * WARP_SIZE + lane];
        }
    };
    const auto load_pair = [&](float (&to)[2], const u16* from, int tile, int at) {
        from += (static_cast<size_t>(row_tile(tile)) * num_groups + at) * TILE_ROWS + g;
        to[0] = from_half(from[0]);
        to[1] = from_half(from[8]);
    };

    Product<kind, num_row_tiles, num_columns> product;
    uint4 ahead[DEPTH][num_row_tiles];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        if (begin + i < end) load_codes(ahead[i], begin + i);
    }
    for (int first = begin; first < end; first += DEPTH) {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            const int at = first + i;
            if (at < end) {
                uint4 now[num_row_tiles];
#pragma unroll
                for (int tile = 0; tile < num_row_tiles; ++tile) now[tile] = ahead[i][tile];
                if (at + DEPTH < end) load_codes(ahead[i], at + DEPTH);
#pragma unroll
                for (int half = 0; half < TILE_COLUMNS<kind> / HALF_COLUMNS; ++half) {
                    const int column = at * TILE_COLUMNS<kind> + half * HALF_COLUMNS;
                    if (column < k) {
                        product.add_half(now, half, x, first_row, m, column, k, offsets != nullptr);
                        const int next = column + HALF_COLUMNS;
                        if (next % group_size == 0 || next >= min(k, end * TILE_COLUMNS<kind>)) {
#pragma unroll
                            for (int tile = 0; tile < num_row_tiles; ++tile) {
                                float scale[2], offset[2] = {};
                                load_pair(scale, scales, tile, column / group_size);
                                if (offsets != nullptr) load_pair(offset, offsets, tile, column / group_size);
                                product.end_group(tile, scale, offset);
                            }
                            product.clear_x_sums();
                        }
                    }
                }
            }
        }
    }

#pragma unroll
    for (int tile = 0; tile < num_row_tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < num_columns; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int output = (first_tile + tile) * TILE_ROWS + g + j / 2 * 8;
                const int row = first_row + 8 * i + 2 * t + j % 2;
                if (output < n && row < m) {
                    partials[(static_cast<size_t>(blockIdx.y) * m + row) * n + output] = product.total.values[tile][i][j];
                }
            }
        }
    }
}

}  // namespace

#define QUANTISED_GEMM(name, kind, num_row_tiles, num_columns)                                                       \
    KERNEL(name, 32 * BLOCK_WARPS)                                                                                   \
    (float* partials, const bf16* x, const uint4* codes, const u16* scales, const u16* offsets, int m, int n, int k, \
     int group_size) {                                                                                               \
        multiply<CodeKind::kind, num_row_tiles, num_columns>(partials, x, codes, scales, offsets, m, n, k, group_size); \
    }                                                                                                                \
    EXPORT_KERNEL(name)

QUANTISED_GEMM(gemm_int4_m8, INT4, 2, 1)
QUANTISED_GEMM(gemm_int4_m16, INT4, 2, 2)
QUANTISED_GEMM(gemm_int4_m32, INT4, 2, 4)
QUANTISED_GEMM(gemm_int4_m64, INT4, 1, 8)
QUANTISED_GEMM(gemm_int8_m8, INT8, 2, 1)
QUANTISED_GEMM(gemm_int8_m16, INT8, 2, 2)
QUANTISED_GEMM(gemm_int8_m32, INT8, 2, 4)
QUANTISED_GEMM(gemm_int8_m64, INT8, 1, 8)
QUANTISED_GEMM(gemm_fp8_m8, FP8, 2, 1)
QUANTISED_GEMM(gemm_fp8_m16, FP8, 2, 2)
QUANTISED_GEMM(gemm_fp8_m32, FP8, 2, 4)
QUANTISED_GEMM(gemm_fp8_m64, FP8, 1, 8)
QUANTISED_GEMM(gemm_e2m1_m8, E2M1, 2, 1)
QUANTISED_GEMM(gemm_e2m1_m16, E2M1, 2, 2)
QUANTISED_GEMM(gemm_e2m1_m32, E2M1, 2, 4)
QUANTISED_GEMM(gemm_e2m1_m64, E2M1, 1, 8)
