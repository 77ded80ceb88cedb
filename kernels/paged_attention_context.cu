// Paged attention for rows that are many in their sequence: chunks of the context.
//
//   paged_attention_context_{bf16,int8}_{d64,d96,d128,d256}(AttentionCall call)
//   paged_attention_context_{bf16,int8}_d256_w1 for GPUs with less than 160 KiB of shared memory
//
// A block of 4 warps computes 64 queries of one sequence and key/value head (see paged_attention.cuh), a warp 16 of them,
// over all tiles that one of them sees. A block of the _w1 variants is one warp, and computes 16 queries. A sequence's rows
// take ceil(num_rows * group / 64) entries of `tiles` (_w1: / 16); `split` and `first_partial` are not read. Entries with
// the largest positions are best listed first, for the longest work then begins first.
//
// Launch: block 128 (_w1: 32); grid (counts[0] or more, num_kv_heads).
// Dynamic shared memory: keys and values 256 * D bytes (int8: + 512), d256 queries 32768 (_w1: 8192), running totals
// 256 * D + 2048 (_w1: 64 * D + 512). The totals may be left out if no query of the launch has a position above 255.
#include "paged_attention.cuh"

// The merged splits of a block's queries, in shared memory: each thread's own.
template <int D, int NUM_WARPS>
struct Totals {
    unsigned char* room;
    bool is_empty;

    __device__ __forceinline__ explicit Totals(unsigned char* room) : room(room), is_empty(true) {}

    // Weighted sums of values, as in Partial::out.
    __device__ __forceinline__ float4& out(int n) const {
        return reinterpret_cast<float4*>(room)[n * NUM_WARPS * WARP_SIZE + threadIdx.x];
    }

    // The maxima and the sums of weights of two queries.
    __device__ __forceinline__ float4& max_sum() const { return out(D / 8); }

    // Adds the finished result of a split.
    __device__ __forceinline__ void add(const Partial<D>& partial, float exponent_scale) {
        if (is_empty) {
            is_empty = false;
            max_sum() = make_float4(partial.max[0], partial.max[1], partial.sum[0], partial.sum[1]);
#pragma unroll
            for (int n = 0; n < D / 8; ++n) {
                const float(&x)[4] = partial.out[n];
                out(n) = make_float4(x[0], x[1], x[2], x[3]);
            }
            return;
        }
        const float4 total = max_sum();
        const MergeFactors first(total.x, partial.max[0], exponent_scale);
        const MergeFactors second(total.y, partial.max[1], exponent_scale);
        max_sum() = make_float4(first.max, second.max, first.merge(total.z, partial.sum[0]),
                                second.merge(total.w, partial.sum[1]));
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
            const float(&x)[4] = partial.out[n];
            const float4 total = out(n);
            out(n) = make_float4(first.merge(total.x, x[0]), first.merge(total.y, x[1]),
                                 second.merge(total.z, x[2]), second.merge(total.w, x[3]));
        }
    }

    // Adds the totals to the finished result of the last split.
    __device__ __forceinline__ void add_to(Partial<D>& partial, float exponent_scale) const {
        if (is_empty) return;
        const float4 total = max_sum();
        const MergeFactors first(total.x, partial.max[0], exponent_scale);
        const MergeFactors second(total.y, partial.max[1], exponent_scale);
        partial.sum[0] = first.merge(total.z, partial.sum[0]);
        partial.sum[1] = second.merge(total.w, partial.sum[1]);
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
            float(&x)[4] = partial.out[n];
            const float4 total = out(n);
            x[0] = first.merge(total.x, x[0]), x[1] = first.merge(total.y, x[1]);
            x[2] = second.merge(total.z, x[2]), x[3] = second.merge(total.w, x[3]);
        }
    }
};

template <int D, bool IS_INT8, int NUM_WARPS>
__device__ __forceinline__ void attend_context(const AttentionCall& call) {
    DYNAMIC_SHARED(unsigned char, shared);
    const int kv_head = blockIdx.y;
    if (blockIdx.x >= call.counts[0]) return;
    const QueryTile queries(call, blockIdx.x, NUM_WARPS * WARP_QUERIES);
    if (queries.num_queries == 0) return;
    Walker<D, NUM_WARPS, IS_INT8> walker(call, queries, kv_head, shared);
    Totals<D, NUM_WARPS> totals(shared + SharedLayout<D, NUM_WARPS, IS_INT8>::TOTALS);
    walker.walk(0, queries.num_splits() * (SPLIT_LEN / TILE_LEN),
                [&] { totals.add(walker.partial, call.exponent_scale); });
    totals.add_to(walker.partial, call.exponent_scale);
    walker.write_out();
}

// `min_blocks` a multiprocessor is what the shared memory of an H200 has room for.
#define CONTEXT(name, D, IS_INT8, NUM_WARPS, min_blocks)                                     \
    KERNEL(paged_attention_context_##name, 32 * NUM_WARPS, min_blocks)(AttentionCall call) { \
        attend_context<D, IS_INT8, NUM_WARPS>(call);                                         \
    }                                                                                        \
    EXPORT_KERNEL(paged_attention_context_##name)

CONTEXT(bf16_d64, 64, false, 4, 3)
CONTEXT(bf16_d96, 96, false, 4, 2)
CONTEXT(bf16_d128, 128, false, 4, 2)
CONTEXT(bf16_d256, 256, false, 4, 1)
CONTEXT(bf16_d256_w1, 256, false, 1, 1)
CONTEXT(int8_d64, 64, true, 4, 3)
CONTEXT(int8_d96, 96, true, 4, 2)
CONTEXT(int8_d128, 128, true, 4, 2)
CONTEXT(int8_d256, 256, true, 4, 1)
CONTEXT(int8_d256_w1, 256, true, 1, 1)
