// Paged attention for rows that are few in their sequence: generation, and draft tokens.
//
//   paged_attention_generation_{bf16,int8,fp8}_{d64,d96,d128,d256}(AttentionCall call)
//   paged_attention_generation_{bf16,int8,fp8}_{d64,d128}_alibi with linear biases of scores
//
// A warp is a block, and computes up to 16 queries of one sequence and key/value head (see paged_attention.cuh) over
// one split of 256 positions. A sequence's rows take ceil(num_rows * group / 16) tiles of queries, each with as many
// entries in `tiles` as it has splits:
//
//   entries    | split 0 of every tile of queries            | the other splits, in any order          |
//              0                                     counts[1]                                counts[0]
//   splits of a tile: last position / 256 + 1, where the last position is position + (its last query) / group
//
// Launch: block 32; grid (any number >= 1, num_kv_heads): blocks take the entries x, x + gridDim.x, ... So a captured
// launch serves any number of entries; best are as many blocks as there are entries, or a multiple of those that fit
// the GPU at once. Dynamic shared memory: 256 * D bytes, int8 128 * D + 512; d256 73728, int8 74240. D, the suffix, is
// at least head_dim.
//
// Any rows may be computed here, for their results are those of paged_attention_context. It is the faster one if a
// sequence has few queries, or if there are too few blocks of 64 queries for the GPU.
//
// A tile of one split writes to `out`. The others write partial results, and paged_attention_merge has to follow:
//   partials   [sum of num_queries * num_splits over the tiles of queries with several splits][num_kv_heads]
//              [out: head_dim, max, sum, ...: (head_dim + 9) / 8 * 8 floats]
//   entry.first_partial = the sum over the tiles before it; split s begins at first_partial + s * num_queries
//
// Memory: reads each key and value once per tile of queries, 4 * head_dim bytes a position and key/value head (int8: 2
// * head_dim + 8), and writes and reads 4 * (head_dim + 8) bytes a query and split. With 128 elements and a group of 4
// that is 131072 + 4352 bytes a split in bf16. A block has one of two tiles in flight while it computes the other one:
// 16 KiB of 128 elements in bf16. Six blocks a multiprocessor have 96 KiB in flight; 4.3 TB/s at a latency of 0.8 us
// need 26 KiB. Operations: D instructions mma.m16n8k16 and D / 2 ldmatrix.x4 a tile. An H200 reads a tile of 128
// elements in bf16 in 1.0 us a multiprocessor, which has the tensor cores busy for about a tenth of that.
//
//                         registers                 blocks = warps a multiprocessor
//                         sm_80 sm_86 sm_89 sm_90   sm_80 sm_86 sm_89 sm_90
//   bf16_d64               182   186   186   181       8     5     5     8
//   int8_d64               166   166   166   166      12    10    10    12
//   bf16_d96               200   210   210   204       6     4     4     8
//   int8_d96               195   200   200   204       8     7     7     8
//   bf16_d128              240   250   250   215       4     3     3     6
//   int8_d128              234   237   237   234       8     5     5     8
//   bf16_d256              254   255   255   255       2     1     1     3
//   int8_d256              254   255   255   255       2     1     1     3
//   bf16_d64_alibi         184   190   190   181       8     5     5     8
//   int8_d64_alibi         173   175   175   177       8     8     8     8
//   bf16_d128_alibi        240   244   244   217       4     3     3     6
//   int8_d128_alibi        233   233   233   234       8     5     5     8
//
// fp8 as int8. (NVRTC 12.4, no spills. Blocks by shared memory, 1 KiB of which is the system's, and by registers.)
// Measured on an H200 with 1024 positions: 3.2 TB/s with 256 sequences, 2.3 with 32; fp8 2.3 and 1.9
// (docs/src/results-gpus.md). To be tried on a GPU: keys and values with the cache hint evict_first, so that partial
// results stay in the L2 cache; more positions a split, for fewer partial results.
#include "paged_attention.cuh"

template <int D, class Element, bool HAS_SLOPES>
__device__ __forceinline__ void generate(const AttentionCall& call) {
    DYNAMIC_SHARED(unsigned char, shared);
    const int kv_head = blockIdx.y;
    for (u32 index = blockIdx.x; index < call.counts[0]; index += gridDim.x) {
        const QueryTile queries(call, index, WARP_QUERIES);
        if (queries.num_queries == 0) continue;
        const int split = queries.entry().split;
        Walker<D, 1, Element, HAS_SLOPES> walker(call, queries, kv_head, shared);
        if (!walker.sight.any_sees(split * SPLIT_LEN, (split + 1) * SPLIT_LEN)) continue;
        constexpr int TILES = SPLIT_LEN / TILE_LEN;
        walker.walk(split * TILES, (split + 1) * TILES, [] {});
        if (queries.num_splits() == 1) {
            walker.write_out();
            continue;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (walker.positions[i] < 0) continue;
            float* const partial = queries.partial(kv_head, split, walker.query(i));
            walker.for_pairs(i, [&](int dim, float x, float y) {
                *reinterpret_cast<float2*>(partial + dim) = make_float2(x, y);
            });
            if (threadIdx.x % 4 == 0) {
                *reinterpret_cast<float2*>(partial + call.head_dim) =
                    make_float2(walker.partial.max[i], walker.partial.sum[i]);
            }
        }
    }
}

// `min_blocks` a multiprocessor, which bounds the registers.
#define GENERATION(name, D, Element, min_blocks, HAS_SLOPES)                        \
    KERNEL(paged_attention_generation_##name, 32, min_blocks)(AttentionCall call) { \
        generate<D, Element, HAS_SLOPES>(call);                                     \
    }                                                                               \
    EXPORT_KERNEL(paged_attention_generation_##name)

GENERATION(bf16_d64, 64, bf16, 8, false)
GENERATION(bf16_d96, 96, bf16, 8, false)
GENERATION(bf16_d128, 128, bf16, 6, false)
GENERATION(bf16_d256, 256, bf16, 3, false)
GENERATION(int8_d64, 64, i8, 12, false)
GENERATION(int8_d96, 96, i8, 8, false)
GENERATION(int8_d128, 128, i8, 8, false)
GENERATION(int8_d256, 256, i8, 3, false)
GENERATION(fp8_d64, 64, e4m3, 12, false)
GENERATION(fp8_d96, 96, e4m3, 8, false)
GENERATION(fp8_d128, 128, e4m3, 8, false)
GENERATION(fp8_d256, 256, e4m3, 3, false)
GENERATION(bf16_d64_alibi, 64, bf16, 8, true)
GENERATION(bf16_d128_alibi, 128, bf16, 6, true)
GENERATION(int8_d64_alibi, 64, i8, 8, true)
GENERATION(int8_d128_alibi, 128, i8, 8, true)
GENERATION(fp8_d64_alibi, 64, e4m3, 8, true)
GENERATION(fp8_d128_alibi, 128, e4m3, 8, true)
