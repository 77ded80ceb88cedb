// Tensor cores and asynchronous copies, right and with mistakes. tests/suite/machine.rs expects what each of them does.
#include "tensor_cores.cuh"

namespace {

constexpr int TILE = 64, DEPTH = 32;
// Rows of 80 bytes: eight of them lie in different banks.
constexpr int ROW = DEPTH + 8;

// c[m][n] = a[m][k] * b[n][k]^T, where m and n are multiples of TILE and k of DEPTH. Tiles of the next step arrive
// while this one is computed. 4 warps, each with 16 rows of the tile.
template <bool has_wait, bool has_reuse_barrier>
__device__ __forceinline__ void multiply(float* c, const bf16* a, const bf16* b, int n, int k) {
    SHARED_ARRAY(bf16, a_tiles, 2 * TILE * ROW);
    SHARED_ARRAY(bf16, b_tiles, 2 * TILE * ROW);
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const size_t first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
    float sums[8][4] = {};
    const auto load = [&](int stage, int depth) {
        for (int i = threadIdx.x; i < TILE * DEPTH / VECTOR; i += blockDim.x) {
            const int row = i / (DEPTH / VECTOR), at = i % (DEPTH / VECTOR) * VECTOR;
            const int to = (stage * TILE + row) * ROW + at;
            cp_async_16(shared_address(a_tiles + to), a + (first_row + row) * k + depth + at);
            cp_async_16(shared_address(b_tiles + to), b + (first_column + row) * k + depth + at);
        }
        cp_async_commit();
    };
    load(0, 0);
    for (int depth = 0, stage = 0; depth < k; depth += DEPTH, stage ^= 1) {
        if (depth + DEPTH < k) {
            load(stage ^ 1, depth + DEPTH);
            if (has_wait) cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        const bf16* const a_tile = a_tiles + stage * TILE * ROW;
        const bf16* const b_tile = b_tiles + stage * TILE * ROW;
        for (int inner = 0; inner < DEPTH; inner += 16) {
            u32 x[4];
            ldmatrix_x4(x, shared_address(a_tile + (warp * 16 + lane % 16) * ROW + inner + lane / 16 * 8));
            for (int column = 0; column < 8; column += 2) {
                u32 y[4];
                ldmatrix_x4(y, shared_address(b_tile + (column * 8 + lane / 16 * 8 + lane % 8) * ROW + inner + lane / 8 % 2 * 8));
                mma_bf16(sums[column], x, {y[0], y[1]});
                mma_bf16(sums[column + 1], x, {y[2], y[3]});
            }
        }
        if (has_reuse_barrier) __syncthreads();
    }
    for (int column = 0; column < 8; ++column) {
        for (int i = 0; i < 4; ++i) {
            const size_t to_row = first_row + warp * 16 + lane / 4 + i / 2 * 8;
            c[to_row * n + first_column + column * 8 + lane % 4 * 2 + i % 2] = sums[column][i];
        }
    }
}

}  // namespace

KERNEL(test_multiply, 128)
(float* c, const bf16* a, const bf16* b, int n, int k) { multiply<true, true>(c, a, b, n, k); }
EXPORT_KERNEL(test_multiply)

KERNEL(test_multiply_without_wait, 128)
(float* c, const bf16* a, const bf16* b, int n, int k) { multiply<false, true>(c, a, b, n, k); }
EXPORT_KERNEL(test_multiply_without_wait)

KERNEL(test_multiply_without_barrier, 128)
(float* c, const bf16* a, const bf16* b, int n, int k) { multiply<true, false>(c, a, b, n, k); }
EXPORT_KERNEL(test_multiply_without_barrier)

// One warp turns 8 x 32 elements by 90 degrees: out[32][8], where out[column][row] = x[row][column].
KERNEL(test_transpose, 32)(u16* out, const u16* x) {
    SHARED_ARRAY(u16, tile, 8 * 32);
    const int lane = threadIdx.x;
    // The right three quarters arrive by copies, the left one is zeros.
    for (int row = 0; row < 8; ++row) {
        if (lane < 4) cp_async_16_or_zeros(shared_address(tile + row * 32 + lane * 8), x + row * 32 + lane * 8, lane > 0);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    u32 r[4];
    ldmatrix_x4_transposed(r, shared_address(tile + lane % 8 * 32 + lane / 8 * 8));
    for (int matrix = 0; matrix < 4; ++matrix) {
        const int column = matrix * 8 + lane / 4, row = lane % 4 * 2;
        *reinterpret_cast<u32*>(out + column * 8 + row) = r[matrix];
    }
}
EXPORT_KERNEL(test_transpose)
