// Sorts rows by their experts, and cuts the rows of each expert into tiles for expert_gemm.cu.
//
//   experts [num_pairs] u32    the expert of each row and rank, num_pairs = num_rows * num_chosen; one that is not below gridDim.x: none
//   sorted [num_pairs]         for each place of the sorted order, its row
//   places [num_pairs]         for each row and rank, its place
//   tiles [num_tiles]          (expert, first place, number of places, 0)
//
//   experts    3 1 | 1 4 | 3 4              rows 0, 1 and 2
//   sorted     0 1 | 0 2 | 1 2              of experts 1, 3 and 4: rows in order
//   tiles      (0,0,0) (1,0,2) (2,2,0) (3,2,2) (4,4,2)
//
// The places before expert e fill at most start / tile_rows + e tiles, where start is its first place. So its
// tiles begin there, whatever the others have, and there are num_tiles = num_pairs / tile_rows + num_experts, of which
// some are empty: no expert needs to know more of the others than how many places are before its own. Nothing goes to
// the host, so that the same launches do for any step.
//
// Grid (num_experts), blocks of any number of warps: it changes nothing. An expert reads all experts, and a second time
// if it has rows: 8 bytes per expert, row and rank, from the L2 cache. Not measured yet.
#include "common.cuh"

namespace {

constexpr int MAX_WARPS = 32;

// The sum over a block, in each of its threads. `scratch` may be used again after the next __syncthreads().
__device__ __forceinline__ int block_sum(int x, int* scratch) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, num_warps = blockDim.x / WARP_SIZE;
#pragma unroll
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    int sum = 0;
    for (int i = 0; i < num_warps; ++i) sum += scratch[i];
    return sum;
}

}  // namespace

KERNEL(sort_experts, 1024)
(u32* __restrict__ sorted, u32* __restrict__ places, uint4* __restrict__ tiles, const u32* __restrict__ experts,
 int num_pairs, int num_chosen, int tile_rows, int num_tiles) {
    SHARED_ARRAY(int, before_sums, MAX_WARPS);
    SHARED_ARRAY(int, own_sums, MAX_WARPS);
    const u32 expert = blockIdx.x;
    int before = 0, own = 0;
    for (int pair = threadIdx.x; pair < num_pairs; pair += blockDim.x) {
        const u32 other = experts[pair];
        before += other < expert;
        own += other == expert;
    }
    const int start = block_sum(before, before_sums), len = block_sum(own, own_sums);

    const int first_tile = start / tile_rows + expert;
    const bool is_last = expert + 1 == gridDim.x;
    const int end_tile = is_last ? num_tiles : (start + len) / tile_rows + expert + 1;
    for (int tile = first_tile + threadIdx.x; tile < end_tile; tile += blockDim.x) {
        const int first = (tile - first_tile) * tile_rows;
        tiles[tile] = make_uint4(expert, start + first, max(0, min(tile_rows, len - first)), 0);
    }

    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, num_warps = blockDim.x / WARP_SIZE;
    int next = start;
    for (int first = 0; first < num_pairs && next < start + len; first += blockDim.x) {
        const int pair = first + threadIdx.x;
        const bool is_own = pair < num_pairs && experts[pair] == expert;
        const u32 of_warp = __ballot_sync(ALL_LANES, is_own);
        __syncthreads();
        if (lane == 0) own_sums[warp] = __popc(of_warp);
        __syncthreads();
        int place = next + __popc(of_warp & ((1u << lane) - 1));
        for (int i = 0; i < num_warps; ++i) {
            if (i < warp) place += own_sums[i];
            next += own_sums[i];
        }
        if (is_own) {
            sorted[place] = pair / num_chosen;
            places[pair] = place;
        }
    }
}
EXPORT_KERNEL(sort_experts)
