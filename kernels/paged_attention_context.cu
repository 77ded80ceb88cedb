// Paged attention for rows that are many in their sequence: chunks of the context.
//
//   paged_attention_context_{bf16,int8,fp8}_{d64,d96,d128,d256}(AttentionCall call)
//   paged_attention_context_{bf16,int8,fp8}_d256_w1 for GPUs with less than 163 KiB of shared memory a block
//   paged_attention_context_{bf16,int8,fp8}_{d64,d128}_alibi with linear biases of scores
//   (larger heads have no registers for these)
//
// A block of 4 warps computes 64 queries of one sequence and key/value head (see paged_attention.cuh), a warp 16 of
// them, over all tiles that one of them sees. A block of the _w1 variants is one warp, and computes 16 queries. A
// sequence's rows take ceil(num_rows * group / 64) entries of `tiles` (_w1: / 16); `split` and `first_partial` are not
// read. Entries with the largest positions are best listed first, for the longest work then begins first.
//
// Launch: block 128 (_w1: 32); grid (counts[0] or more, num_kv_heads).
// Dynamic shared memory: keys and values 256 * D bytes (int8: + 512), d256 queries 32768 (_w1: 8192), running totals
// 256 * D + 2048 (_w1: 64 * D + 512). The totals may be left out if no query of the launch has a position above 255.
//
// Operations: 4 * head_dim a query and position that is seen, and up to 127 positions more a query: the rest of its
// last tile, and what only other queries of the block see. Four warps read a tile of keys and values from shared memory
// with ldmatrix, 1024 * D bytes, and write it once, 256 * D, for 16384 * D operations: 12.8 a byte. With 128 bytes a
// clock that bounds a multiprocessor to 1638 operations a clock: an H200 to 380 TFLOP/s (132, 1.755 GHz), an A100 to
// 250 (108, 1.41 GHz). Measured on an H200: 252 TFLOP/s for a prompt of 8192 tokens, 135 for 1024
// (docs/src/results-gpus.md). Queries of two tiles of 16 a warp would halve the reads; but their sums and totals need
// twice the registers and shared memory. Memory: each block reads the keys and values that its queries see, mostly from
// the L2 cache: 64 operations a byte. Totals are read and written once a split: 2 * 256 * D bytes beside the 5120 * D
// of its four tiles.
//
//                         registers                 blocks of 4 warps a multiprocessor
//                         sm_80 sm_86 sm_89 sm_90   sm_80 sm_86 sm_89 sm_90
//   bf16_d64               127   150   150   128       4     2     2     4
//   int8_d64               128   148   148   128       4     2     2     4
//   bf16_d96               168   189   189   168       3     1     1     3
//   int8_d96               168   190   190   167       3     1     1     3
//   bf16_d128              199   202   202   168       2     1     1     3
//   int8_d128              205   200   200   220       2     1     1     2
//   bf16_d256              253   255   255   255       1     -     -     1
//   int8_d256              251   255   255   255       1     -     -     1
//   bf16_d256_w1           254   254   254   253       1     1     1     2   (of one warp)
//   int8_d256_w1           254   254   254   255       1     1     1     2
//   bf16_d64_alibi         127   145   145   128       4     2     2     4
//   int8_d64_alibi         128   154   154   128       4     2     2     4
//   bf16_d128_alibi        201   206   206   212       2     1     1     2   (sm_90: three blocks spill)
//   int8_d128_alibi        207   204   204   220       2     1     1     2
//
// fp8 as int8, or one register less. (NVRTC 12.4, no spills. Blocks by shared memory, 1 KiB of which is the system's,
// and by registers.)
#include "paged_attention.cuh"

template <int D, class Element, int NUM_WARPS, bool HAS_SLOPES>
__device__ __forceinline__ void attend_context(const AttentionCall& call) {
    DYNAMIC_SHARED(unsigned char, shared);
    const int kv_head = blockIdx.y;
    if (blockIdx.x >= call.counts[0]) return;
    const QueryTile queries(call, blockIdx.x, NUM_WARPS * WARP_QUERIES);
    if (queries.num_queries == 0) return;
    Walker<D, NUM_WARPS, Element, HAS_SLOPES> walker(call, queries, kv_head, shared);
    Totals<D, NUM_WARPS> totals(shared + SharedLayout<D, NUM_WARPS, Element>::TOTALS);
    walker.walk(0, queries.num_splits() * (SPLIT_LEN / TILE_LEN),
                [&] { totals.add(walker.partial, call.exponent_scale); });
    totals.add_to(walker.partial, call.exponent_scale);
    walker.write_out();
}

// Shared memory of a multiprocessor, in KiB.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr int MULTIPROCESSOR_KIB = 228;
#elif __CUDA_ARCH__ >= 860
constexpr int MULTIPROCESSOR_KIB = 100;
#else
constexpr int MULTIPROCESSOR_KIB = 164;
#endif

// Blocks of a multiprocessor, which bound the registers of a thread: MAX, or what its shared memory has room for.
template <int D, class Element, int NUM_WARPS>
constexpr int BLOCK_BYTES =
    SharedLayout<D, NUM_WARPS, Element>::TOTALS + NUM_WARPS * WARP_SIZE * 16 * (D / 8 + 1) + 1024;
template <int MAX, int BYTES>
constexpr int NUM_BLOCKS = MAX * BYTES <= MULTIPROCESSOR_KIB * 1024 ? MAX : NUM_BLOCKS<MAX - 1, BYTES>;
template <int BYTES>
constexpr int NUM_BLOCKS<1, BYTES> = 1;

// A __grid_constant__ is read where it is needed, and takes no registers.
#define CONTEXT(name, D, Element, NUM_WARPS, max_blocks, HAS_SLOPES)                                              \
    KERNEL(paged_attention_context_##name, 32 * NUM_WARPS,                                                        \
           NUM_BLOCKS<max_blocks, BLOCK_BYTES<D, Element, NUM_WARPS>>)                                            \
    (const __grid_constant__ AttentionCall call) { attend_context<D, Element, NUM_WARPS, HAS_SLOPES>(call); }     \
    EXPORT_KERNEL(paged_attention_context_##name)

CONTEXT(bf16_d64, 64, bf16, 4, 4, false)
CONTEXT(bf16_d96, 96, bf16, 4, 3, false)
CONTEXT(bf16_d128, 128, bf16, 4, 3, false)
CONTEXT(bf16_d256, 256, bf16, 4, 1, false)
CONTEXT(bf16_d256_w1, 256, bf16, 1, 1, false)
CONTEXT(int8_d64, 64, i8, 4, 4, false)
CONTEXT(int8_d96, 96, i8, 4, 3, false)
CONTEXT(int8_d128, 128, i8, 4, 2, false)
CONTEXT(int8_d256, 256, i8, 4, 1, false)
CONTEXT(int8_d256_w1, 256, i8, 1, 1, false)
CONTEXT(fp8_d64, 64, e4m3, 4, 4, false)
CONTEXT(fp8_d96, 96, e4m3, 4, 3, false)
CONTEXT(fp8_d128, 128, e4m3, 4, 2, false)
CONTEXT(fp8_d256, 256, e4m3, 4, 1, false)
CONTEXT(fp8_d256_w1, 256, e4m3, 1, 1, false)
CONTEXT(bf16_d64_alibi, 64, bf16, 4, 4, true)
CONTEXT(bf16_d128_alibi, 128, bf16, 4, 2, true)
CONTEXT(int8_d64_alibi, 64, i8, 4, 4, true)
CONTEXT(int8_d128_alibi, 128, i8, 4, 2, true)
CONTEXT(fp8_d64_alibi, 64, e4m3, 4, 4, true)
CONTEXT(fp8_d128_alibi, 128, e4m3, 4, 2, true)
