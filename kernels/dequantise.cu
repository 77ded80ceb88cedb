// Weights as bf16, for products with many rows, which cuBLASLt computes: out = scale * code + offset, rounded once.
//
//   codes, scales, offsets: as quantised.cuh says; offsets may be null    out [n][k] bf16
//
// Grid (ceil(n / 16), p), any p: a warp has a tile, and the warps of all blocks with the same row tile share its column
// tiles. A lane writes 8 consecutive weights at once if k is a multiple of 8. Reads bits / 8 bytes per weight, writes
// 2. No shared memory.
#include "quantised.cuh"

namespace {

using namespace quantised;

template <CodeKind kind>
__device__ __forceinline__ void dequantise(bf16* __restrict__ out, const uint4* __restrict__ codes,
                                           const u16* __restrict__ scales, const u16* __restrict__ offsets, int n, int k,
                                           int group_size) {
    const Shape shape = {n, k, group_size};
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const int num_warps = blockDim.x / WARP_SIZE, num_tiles = shape.num_column_tiles<kind>();
    const int row_tile = blockIdx.x;
    for (int tile = blockIdx.y * num_warps + threadIdx.x / WARP_SIZE; tile < num_tiles; tile += gridDim.y * num_warps) {
        const uint4 words = codes[(static_cast<size_t>(row_tile) * num_tiles + tile) * WARP_SIZE + lane];
#pragma unroll
        for (int half = 0; half < TILE_COLUMNS<kind> / HALF_COLUMNS; ++half) {
            const int column = tile * TILE_COLUMNS<kind> + half * HALF_COLUMNS + 8 * t;
            if (column >= k) continue;
            u32 a[2][4];
            unpack<kind>(a[0], words, half, 0);
            unpack<kind>(a[1], words, half, 1);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = row_tile * TILE_ROWS + g + 8 * i;
                if (row >= n) continue;
                const size_t group = static_cast<size_t>(row_tile) * shape.num_groups() + column / group_size;
                const float scale = from_half(scales[group * TILE_ROWS + g + 8 * i]);
                const float offset = offsets != nullptr ? from_half(offsets[group * TILE_ROWS + g + 8 * i]) : 0.0f;
                float weights[VECTOR];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const u32 pair = a[j / 2][j % 2 * 2 + i];
                    weights[2 * j] = low_float(pair) * scale + offset;
                    weights[2 * j + 1] = high_float(pair) * scale + offset;
                }
                bf16* const to = out + static_cast<size_t>(row) * k + column;
                if (k % VECTOR == 0) {
                    store_8(to, weights);
                } else {
#pragma unroll
                    for (int j = 0; j < VECTOR; ++j) {
                        if (column + j < k) to[j] = to_bf16(weights[j]);
                    }
                }
            }
        }
    }
}

}  // namespace

KERNEL(dequantise_int4, 1024)
(bf16* out, const uint4* codes, const u16* scales, const u16* offsets, int n, int k, int group_size) {
    dequantise<CodeKind::INT4>(out, codes, scales, offsets, n, k, group_size);
}
EXPORT_KERNEL(dequantise_int4)

KERNEL(dequantise_int8, 1024)
(bf16* out, const uint4* codes, const u16* scales, const u16* offsets, int n, int k, int group_size) {
    dequantise<CodeKind::INT8>(out, codes, scales, offsets, n, k, group_size);
}
EXPORT_KERNEL(dequantise_int8)

KERNEL(dequantise_fp8, 1024)
(bf16* out, const uint4* codes, const u16* scales, const u16* offsets, int n, int k, int group_size) {
    dequantise<CodeKind::FP8>(out, codes, scales, offsets, n, k, group_size);
}
EXPORT_KERNEL(dequantise_fp8)

KERNEL(dequantise_e2m1, 1024)
(bf16* out, const uint4* codes, const u16* scales, const u16* offsets, int n, int k, int group_size) {
    dequantise<CodeKind::E2M1>(out, codes, scales, offsets, n, k, group_size);
}
EXPORT_KERNEL(dequantise_e2m1)
