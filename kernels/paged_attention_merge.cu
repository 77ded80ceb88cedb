// Merges the partial results of paged_attention_generation, for tiles of several splits.
//
//   paged_attention_merge(AttentionCall call)       with the same argument, on the same stream
//
// Launch: block 128; grid (any number >= 1, num_kv_heads, 1 to 16): blocks take the tiles of queries x, x + gridDim.x,
// ..., and of them the queries z, z + gridDim.z, ... Best are counts[1] and min(16, num_rows * group). No dynamic
// shared memory.
//
// A thread computes an element of a query, and loads 32 splits at once: the order of the sums is that of the splits, so
// time is that of ceil(splits / 32) waits for memory, and of the chain of maxima. Reads 4 * (head_dim + 8) bytes a
// query and split, which are mostly in the L2 cache still. 142 to 146 registers: 3 blocks a multiprocessor. Not
// measured yet.
#include "paged_attention.cuh"

KERNEL(paged_attention_merge, 128, 3)(AttentionCall call) {
    // Partial results that are loaded at once, to wait for memory once.
    constexpr int NUM_LOADED = 32;
    const int kv_head = blockIdx.y;
    for (u32 index = blockIdx.x; index < call.counts[1]; index += gridDim.x) {
        const QueryTile queries(call, index, WARP_QUERIES);
        if (queries.num_queries == 0) continue;
        const int num_splits = queries.num_splits();
        if (num_splits == 1) continue;
        const Sight sight = queries.sight();
        const size_t split_stride = queries.split_stride();
        for (int query = blockIdx.z; query < queries.num_queries; query += gridDim.z) {
            const float* const partials = queries.partial(kv_head, 0, query);
            for (int dim = threadIdx.x; dim < call.head_dim; dim += blockDim.x) {
                float max = -infinity(), sum = 0.0f, out = 0.0f;
                for (int begin = 0; begin < num_splits; begin += NUM_LOADED) {
                    float2 max_sum[NUM_LOADED];
                    float added[NUM_LOADED];
#pragma unroll
                    for (int i = 0; i < NUM_LOADED; ++i) {
                        const int split = begin + i;
                        max_sum[i] = make_float2(-infinity(), 0.0f);
                        added[i] = 0.0f;
                        if (split < num_splits && sight.any_sees(split * SPLIT_LEN, (split + 1) * SPLIT_LEN)) {
                            const float* const partial = partials + split * split_stride;
                            max_sum[i] = *reinterpret_cast<const float2*>(partial + call.head_dim);
                            added[i] = partial[dim];
                        }
                    }
#pragma unroll
                    for (int i = 0; i < NUM_LOADED; ++i) {
                        const MergeFactors factors(max, max_sum[i].x, call.exponent_scale);
                        max = factors.max;
                        sum = factors.merge(sum, max_sum[i].y);
                        out = factors.merge(out, added[i]);
                    }
                }
                const float reciprocal = reciprocal_of_sum(call, queries.head(kv_head, query), max, sum);
                call.out[queries.offset(kv_head, query) + dim] = to_bf16(finished(out, reciprocal));
            }
        }
    }
}
EXPORT_KERNEL(paged_attention_merge)
