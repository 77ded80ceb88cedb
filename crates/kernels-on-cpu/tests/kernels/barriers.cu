// Kernels that need barriers and shuffles, and the same ones with mistakes. tests/suite/machine.rs expects what each of
// them does.
#include "common.cuh"

namespace {

// out[block][i] = x[block][n - 1 - i], by way of shared memory.
template <bool has_barrier>
__device__ __forceinline__ void reverse(float* out, const float* x) {
    SHARED_ARRAY(float, tile, 1024);
    const int n = blockDim.x, i = threadIdx.x;
    const size_t at = static_cast<size_t>(blockIdx.x) * n;
    tile[i] = x[at + i];
    if (has_barrier) __syncthreads();
    out[at + i] = tile[n - 1 - i];
}

// The sums of the rows of [num_rows][blockDim], with one array for all rows: threads must have read the sums of a row
// before they write those of the next one.
template <bool has_barrier>
__device__ __forceinline__ void sum_rows(float* out, const float* x, int num_rows) {
    SHARED_ARRAY(float, sums, WARP_SIZE);
    for (int row = 0; row < num_rows; ++row) {
        const float sum = block_sum(x[row * blockDim.x + threadIdx.x], sums);
        if (threadIdx.x == 0) out[row] = sum;
        if (has_barrier) __syncthreads();
    }
}

// Lane 0 writes, the others read after a shuffle, which orders no memory, or after a barrier, which does.
template <bool has_barrier>
__device__ __forceinline__ void broadcast(float* out, const float* x) {
    SHARED_ARRAY(float, cell, 1);
    if (threadIdx.x == 0) cell[0] = x[0];
    if (has_barrier) {
        __syncwarp();
    } else {
        __shfl_sync(ALL_LANES, 0, 0);
    }
    out[threadIdx.x] = cell[0];
}

}  // namespace

KERNEL(test_reverse, 1024)(float* out, const float* x) { reverse<true>(out, x); }
EXPORT_KERNEL(test_reverse)

KERNEL(test_reverse_without_barrier, 1024)(float* out, const float* x) { reverse<false>(out, x); }
EXPORT_KERNEL(test_reverse_without_barrier)

KERNEL(test_sum_rows, 1024)(float* out, const float* x, int num_rows) { sum_rows<true>(out, x, num_rows); }
EXPORT_KERNEL(test_sum_rows)

KERNEL(test_sum_rows_without_barrier, 1024)
(float* out, const float* x, int num_rows) { sum_rows<false>(out, x, num_rows); }
EXPORT_KERNEL(test_sum_rows_without_barrier)

KERNEL(test_broadcast, 32)(float* out, const float* x) { broadcast<true>(out, x); }
EXPORT_KERNEL(test_broadcast)

KERNEL(test_broadcast_by_shuffle, 32)(float* out, const float* x) { broadcast<false>(out, x); }
EXPORT_KERNEL(test_broadcast_by_shuffle)

KERNEL(test_barrier_of_some, 1024)(float* out) {
    if (threadIdx.x < 64) __syncthreads();
    out[threadIdx.x] = 0.0f;
}
EXPORT_KERNEL(test_barrier_of_some)

KERNEL(test_two_barriers, 1024)(float* out) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    out[threadIdx.x] = 0.0f;
}
EXPORT_KERNEL(test_two_barriers)

KERNEL(test_shuffle_of_some, 1024)(float* out) {
    float x = 1.0f;
    if (threadIdx.x % 2 == 0) x = __shfl_xor_sync(ALL_LANES, x, 2);
    out[threadIdx.x] = x;
}
EXPORT_KERNEL(test_shuffle_of_some)

KERNEL(test_shuffle_with_mask, 1024)(float* out) {
    out[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.0f, 2);
}
EXPORT_KERNEL(test_shuffle_with_mask)

// All lanes exchange values: x of the lane above, of the lane below, of lane 5, and the votes for x > 0.
KERNEL(test_exchange, 1024)(float* out, const float* x) {
    const int i = threadIdx.x, n = blockDim.x;
    out[i] = __shfl_down_sync(ALL_LANES, x[i], 1);
    out[n + i] = __shfl_up_sync(ALL_LANES, x[i], 1);
    out[2 * n + i] = __shfl_sync(ALL_LANES, x[i], 5);
    out[3 * n + i] = static_cast<float>(__popc(__ballot_sync(ALL_LANES, x[i] > 0.0f)));
}
EXPORT_KERNEL(test_exchange)

// Every block writes the same element.
KERNEL(test_blocks_collide, 1024)(float* out) { out[threadIdx.x] = static_cast<float>(blockIdx.x); }
EXPORT_KERNEL(test_blocks_collide)

// One element of a shared array beyond its end, and of a dynamic one.
KERNEL(test_shared_overrun, 1024)(float* out) {
    SHARED_ARRAY(float, tile, 64);
    tile[threadIdx.x + 1] = 1.0f;
    out[threadIdx.x] = tile[threadIdx.x];
}
EXPORT_KERNEL(test_shared_overrun)

KERNEL(test_dynamic_overrun, 1024)(float* out) {
    DYNAMIC_SHARED(float, tile);
    tile[threadIdx.x + 1] = 1.0f;
    out[threadIdx.x] = tile[threadIdx.x];
}
EXPORT_KERNEL(test_dynamic_overrun)

// Beyond the 64 x 64 elements of `out`.
KERNEL(test_global_overrun, 1024)(float* out) { out[64 * 64 + threadIdx.x] = 1.0f; }
EXPORT_KERNEL(test_global_overrun)

// 8 bytes at an address that is not a multiple of 8.
KERNEL(test_misaligned, 1024)(float* out) { reinterpret_cast<uint2*>(out + 1)->x = 0; }
EXPORT_KERNEL(test_misaligned)

// Reads shared memory that nobody wrote.
KERNEL(test_unwritten, 1024)(float* out) {
    SHARED_ARRAY(float, tile, 1024);
    DYNAMIC_SHARED(float, dynamic);
    out[threadIdx.x] = tile[threadIdx.x];
    out[blockDim.x + threadIdx.x] = dynamic[threadIdx.x];
}
EXPORT_KERNEL(test_unwritten)
