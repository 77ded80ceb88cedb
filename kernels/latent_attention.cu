// Latent attention (DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434) over a paged cache of latents: all heads attend to the
// one key of a position, whose first elements are its value.
//
//   latent_attention_generation(AttentionCall call)    then paged_attention_merge
//   latent_attention_context(AttentionCall call)
//   latent_attention_context_t1(AttentionCall call)    for GPUs with less than 163 KiB of shared memory a block
//
//   q [num_rows][num_kv_heads][group][key_dim], rotated          keys [num_blocks][block_size][key_dim] bf16, key_dim <= 576
//   out [num_rows][num_kv_heads][group][head_dim]                head_dim <= 512: the elements of a value
//
// Here num_kv_heads counts groups of query heads, which share the keys: group is at most 16, so that a tile of the
// generation kernel has whole rows of a group. Tiles, entries and partial results are those of
// paged_attention_generation.cu and paged_attention_context.cu, and a query's result is the same in both kernels: see
// paged_attention.cuh. Other than there, a step of the walk has 32 positions, and 4 warps compute 16 queries:
//
//   copy      32 keys to shared memory, while those before them are computed
//   scores    warp w has the elements 16 w .. 16 w + 16 of each 64: q K^T over these; the four parts are added in order of w
//   softmax   each warp computes that of all scores: the same four times
//   values    warp w has the elements 16 w .. 16 w + 16 of each 64 of the result: out += bf16(p) V, of the same 32 keys
//
// Launch: generation and context_t1 block 128, 16 queries; context block 256, 32 queries in two teams of 4 warps that
// share the keys. Grids as those of paged attention, with ceil(num_rows * group / 32) entries a sequence for the
// context (_t1: / 16). Dynamic shared memory: 32 keys 36864 bytes, once for _t1, else twice; the parts of the scores,
// 8192 a team; for the context, running totals, 34816 a team. The totals may be left out if no query of the launch has
// a position above 255.
//
// Operations: 2 * (key_dim + head_dim) a query and position. A team reads 36 KiB of keys twice but for the rotated
// part, and 32 KiB of parts of scores, for 2^20 operations of 576 and 512 elements: 10 a byte of shared memory. Memory:
// each entry reads 2 * key_dim bytes per position; later reads of a position hit the L2 cache. Measured on an H200: 46
// TFLOP/s in generation, 138 to 151 TFLOP/s for contexts.
//
//                 registers                 blocks a multiprocessor
//                 sm_80 sm_86 sm_89 sm_90   sm_80 sm_86 sm_89 sm_90
//   generation     214   214   214   222      2     1     1     2
//   context        194   196   196   196      1     -     -     1
//   context_t1     198   202   202   200      2     1     1     2
//
// (NVRTC 12.4, no spills.)
#include "paged_attention.cuh"

namespace {

// Positions of a step of the walk.
constexpr int STEP_LEN = 32;
// Elements of a key, and of a value, at most.
constexpr int MAX_KEY_DIM = 576, MAX_VALUE_DIM = 512;
// Warps that compute 16 queries.
constexpr int TEAM_WARPS = 4;
constexpr int NUM_KEY_PARTS = MAX_KEY_DIM / (16 * TEAM_WARPS);
constexpr int NUM_VALUE_PARTS = MAX_VALUE_DIM / (16 * TEAM_WARPS);
constexpr int STEP_SCORES = STEP_LEN / 8;

using KeyChunks = Chunks<2 * MAX_KEY_DIM>;
// From a row, and from a warp's 16 elements to its next ones: 8 chunks, which KeyChunks permutes alike.
constexpr int ROW_BYTES = 2 * MAX_KEY_DIM, PART_BYTES = 2 * 16 * TEAM_WARPS;
constexpr int STEP_BYTES = STEP_LEN * MAX_KEY_DIM * 2;
// [TEAM_WARPS][STEP_SCORES][lanes] of float4.
constexpr int SCORE_BYTES = TEAM_WARPS * STEP_SCORES * WARP_SIZE * 16;

// What a warp has of its team's results: out[2 i], out[2 i + 1] are elements 16 w + 64 i .. + 16.
using Part = Partial<16 * NUM_VALUE_PARTS>;

template <int NUM_TEAMS, int NUM_BUFFERS>
struct LatentWalker {
    static constexpr int NUM_WARPS = NUM_TEAMS * TEAM_WARPS;
    static constexpr int SCORES = NUM_BUFFERS * STEP_BYTES;
    static constexpr int TOTALS = SCORES + NUM_TEAMS * SCORE_BYTES;

    const AttentionCall& call;
    const QueryTile& tile_of_queries;
    const int head_group;
    unsigned char* const shared;
    const int part, lane;
    // Those of the lane's two queries; -1: there is none.
    int positions[2];
    Sight sight;
    Part partial;

    __device__ __forceinline__ LatentWalker(const AttentionCall& call, const QueryTile& tile_of_queries, int head_group,
                                            unsigned char* shared)
        : call(call),
          tile_of_queries(tile_of_queries),
          head_group(head_group),
          shared(shared),
          part(threadIdx.x / WARP_SIZE % TEAM_WARPS),
          lane(threadIdx.x % WARP_SIZE) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            positions[i] = query(i) < tile_of_queries.num_queries ? tile_of_queries.position(query(i)) : -1;
        }
        sight = tile_of_queries.sight();
        partial.clear();
    }

    // Query `i` of the lane.
    static __device__ __forceinline__ int query(int i) {
        const int team = NUM_TEAMS == 1 ? 0 : threadIdx.x / (WARP_SIZE * TEAM_WARPS);
        return team * WARP_QUERIES + threadIdx.x % WARP_SIZE / 4 + 8 * i;
    }

    // Element `n % 2` of 8 of the warp's n / 2th 16 elements, of this lane.
    __device__ __forceinline__ int value_dim(int n) const {
        return 16 * (TEAM_WARPS * (n / 2) + part) + n % 2 * 8 + lane % 4 * 2;
    }

    // The block of the lane's position in a step. The load ends while other things are computed.
    __device__ __forceinline__ u32 find_block(int step) const {
        const int position = step * STEP_LEN + lane;
        const AttentionTile& entry = tile_of_queries.entry();
        const u32* const table = call.block_tables + entry.block_table;
        return sight.any_sees(position, position + 1) ? table[block_index(call, position) * entry.table_stride] : NOWHERE;
    }

    // Begins to copy the keys of a step. Elements from key_dim on, and positions that no query sees, are zeros.
    __device__ __forceinline__ void copy_keys(unsigned char* to, int step, u32 block) const {
        const u32 position = step * STEP_LEN + lane;
        const u32 vector = block == NOWHERE ? NOWHERE : (block - block_index(call, position)) * call.block_size + position;
        const u32 key_dim = call.key_dim;
        // Eight lanes copy a row, and eight of its chunks at once, which are permuted among themselves.
        constexpr int ROW_LANES = 8, NUM_ROWS = NUM_WARPS * WARP_SIZE / ROW_LANES;
        const u32 chunk = lane % ROW_LANES;
#pragma unroll
        for (int first_row = 0; first_row < STEP_LEN; first_row += NUM_ROWS) {
            const u32 row = first_row + threadIdx.x / ROW_LANES;
            const u32 of_row = __shfl_sync(ALL_LANES, vector, row);
            const bool has_key = of_row != NOWHERE;
            const bf16* const key = static_cast<const bf16*>(call.keys) + static_cast<u64>(has_key ? of_row : 0) * key_dim;
            const SharedAddress place = kept(shared_address(to + 16 * KeyChunks::place(row, chunk)));
            if (key_dim % VECTOR == 0) {
#pragma unroll
                for (int i = 0; i < MAX_KEY_DIM; i += ROW_LANES * VECTOR) {
                    const u32 dim = i + chunk * VECTOR;
                    cp_async_16_or_zeros(place + 2 * i, key + dim, has_key & (dim < key_dim));
                }
            } else {
#pragma unroll 1
                for (u32 dim = 2 * chunk; dim < MAX_KEY_DIM; dim += 2 * ROW_LANES) {
                    reinterpret_cast<u32*>(to)[KeyChunks::place(row, dim / VECTOR) * 4 + dim / 2 % 4] =
                        has_key && dim < key_dim ? *reinterpret_cast<const u32*>(key + dim) : 0;
                }
            }
        }
    }

    // The warp's part of the scores, over its elements.
    __device__ __forceinline__ void multiply_keys(const u32 (&q)[NUM_KEY_PARTS][4], const unsigned char* keys,
                                                  float4* parts) const {
        float scores[STEP_SCORES][4] = {};
        const unsigned char* const first = keys + 16 * KeyChunks::place(lane / 16 * 8 + lane % 8, 2 * part + lane / 8 % 2);
#pragma unroll
        for (int i = 0; i < NUM_KEY_PARTS; ++i) {
#pragma unroll
            for (int n = 0; n < STEP_SCORES; n += 2) {
                u32 b[4];
                ldmatrix_x4(b, shared_address(first + PART_BYTES * i + ROW_BYTES * 8 * n));
                mma_bf16(scores[n], q[i], {b[0], b[1]});
                mma_bf16(scores[n + 1], q[i], {b[2], b[3]});
            }
        }
#pragma unroll
        for (int n = 0; n < STEP_SCORES; ++n) {
            const float(&x)[4] = scores[n];
            parts[(part * STEP_SCORES + n) * WARP_SIZE + lane] = make_float4(x[0], x[1], x[2], x[3]);
        }
    }

    __device__ __forceinline__ void add_scores(float (&scores)[STEP_SCORES][4], const float4* parts) const {
#pragma unroll
        for (int n = 0; n < STEP_SCORES; ++n) {
            float4 sum = parts[n * WARP_SIZE + lane];
#pragma unroll
            for (int other = 1; other < TEAM_WARPS; ++other) {
                const float4 x = parts[(other * STEP_SCORES + n) * WARP_SIZE + lane];
                sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
            }
            scores[n][0] = sum.x, scores[n][1] = sum.y, scores[n][2] = sum.z, scores[n][3] = sum.w;
        }
    }

    __device__ __forceinline__ void multiply_values(const u32 (&weights)[STEP_SCORES][2], const unsigned char* keys) {
        const unsigned char* const first = keys + 16 * KeyChunks::place(lane % 16, 2 * part + lane / 16);
#pragma unroll
        for (int step = 0; step < STEP_LEN / 16; ++step) {
            const u32 a[4] = {weights[2 * step][0], weights[2 * step][1], weights[2 * step + 1][0],
                              weights[2 * step + 1][1]};
#pragma unroll
            for (int i = 0; i < NUM_VALUE_PARTS; ++i) {
                u32 b[4];
                ldmatrix_x4_transposed(b, shared_address(first + PART_BYTES * i + ROW_BYTES * 16 * step));
                mma_bf16(partial.out[2 * i], a, {b[0], b[1]});
                mma_bf16(partial.out[2 * i + 1], a, {b[2], b[3]});
            }
        }
    }

    // Adds the steps from..to to `partial`, as Walker::walk does. All threads of the block call it.
    template <class AtSplitEnd>
    __device__ __forceinline__ void walk(int from, int to, AtSplitEnd at_split_end) {
        to = min(to, sight.last / STEP_LEN + 1);
        int step = sight.next_tile<STEP_LEN>(from);
        if (step >= to) return;
        u32 block = find_block(step);

        const bf16* queries[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const size_t number = positions[i] < 0 ? 0 : tile_of_queries.number(head_group, query(i));
            queries[i] = call.q + number * call.key_dim;
        }
        u32 q[NUM_KEY_PARTS][4];
#pragma unroll
        for (int i = 0; i < NUM_KEY_PARTS; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int dim = 16 * (TEAM_WARPS * i + part) + j / 2 * 8 + lane % 4 * 2;
                const bool is_read = (positions[j % 2] >= 0) & (dim < call.key_dim);
                q[i][j] = is_read ? *reinterpret_cast<const u32*>(queries[j % 2] + dim) : 0;
            }
        }
        const int team = NUM_TEAMS == 1 ? 0 : threadIdx.x / (WARP_SIZE * TEAM_WARPS);
        float4* const parts = reinterpret_cast<float4*>(shared + SCORES + team * SCORE_BYTES);
        // A block that walks again may still read what it has walked.
        __syncthreads();
        unsigned char *keys = shared, *next_keys = shared + (NUM_BUFFERS - 1) * STEP_BYTES;
        copy_keys(keys, step, block);
        cp_async_commit();
        int next = sight.next_tile<STEP_LEN>(step + 1);
        block = find_block(next);
        while (true) {
            cp_async_wait<0>();
            // The keys are there, and nobody reads those before them any more.
            __syncthreads();
            if (NUM_BUFFERS > 1 && next < to) {
                copy_keys(next_keys, next, block);
                cp_async_commit();
                block = find_block(sight.next_tile<STEP_LEN>(next + 1));
            }
            const bool is_seen = warp_sees<STEP_LEN>(call, positions, step);
            if (is_seen) multiply_keys(q, keys, parts);
            __syncthreads();
            if (is_seen) {
                float scores[STEP_SCORES][4];
                u32 weights[STEP_SCORES][2];
                add_scores(scores, parts);
                softmax<16 * NUM_VALUE_PARTS, bf16>(weights, partial, scores, nullptr, step, positions, call);
                multiply_values(weights, keys);
            }
            if (next >= to) break;
            if (NUM_BUFFERS == 1) {
                __syncthreads();
                copy_keys(keys, next, block);
                cp_async_commit();
                block = find_block(sight.next_tile<STEP_LEN>(next + 1));
            }
            if (next * STEP_LEN / SPLIT_LEN != step * STEP_LEN / SPLIT_LEN) {
                partial.finish_sums();
                at_split_end();
                partial.clear();
            }
            unsigned char* const free = keys;
            keys = next_keys, next_keys = free;
            step = next;
            next = sight.next_tile<STEP_LEN>(step + 1);
        }
        partial.finish_sums();
    }

    // Writes the finished results of this lane.
    __device__ __forceinline__ void write_out() const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (positions[i] < 0) continue;
            bf16* const out = call.out + tile_of_queries.offset(head_group, query(i));
            const int head = tile_of_queries.head(head_group, query(i));
            const float reciprocal = reciprocal_of_sum(call, head, partial.max[i], partial.sum[i]);
#pragma unroll
            for (int n = 0; n < 2 * NUM_VALUE_PARTS; ++n) {
                if (value_dim(n) < call.head_dim) {
                    *reinterpret_cast<u32*>(out + value_dim(n)) =
                        to_bf16_pair(finished(partial.out[n][2 * i], reciprocal),
                                     finished(partial.out[n][2 * i + 1], reciprocal));
                }
            }
        }
    }
};

template <int NUM_TEAMS, int NUM_BUFFERS>
__device__ __forceinline__ void attend_context(const AttentionCall& call) {
    DYNAMIC_SHARED(unsigned char, shared);
    if (blockIdx.x >= call.counts[0]) return;
    const QueryTile queries(call, blockIdx.x, NUM_TEAMS * WARP_QUERIES);
    if (queries.num_queries == 0) return;
    using Walker = LatentWalker<NUM_TEAMS, NUM_BUFFERS>;
    Walker walker(call, queries, blockIdx.y, shared);
    Totals<16 * NUM_VALUE_PARTS, Walker::NUM_WARPS> totals(shared + Walker::TOTALS);
    walker.walk(0, queries.num_splits() * (SPLIT_LEN / STEP_LEN),
                [&] { totals.add(walker.partial, call.exponent_scale); });
    totals.add_to(walker.partial, call.exponent_scale);
    walker.write_out();
}

}  // namespace

KERNEL(latent_attention_generation, 128, 2)(AttentionCall call) {
    DYNAMIC_SHARED(unsigned char, shared);
    const int head_group = blockIdx.y;
    for (u32 index = blockIdx.x; index < call.counts[0]; index += gridDim.x) {
        const QueryTile queries(call, index, WARP_QUERIES);
        if (queries.num_queries == 0) continue;
        const int split = queries.entry().split;
        LatentWalker<1, 2> walker(call, queries, head_group, shared);
        if (!walker.sight.any_sees(split * SPLIT_LEN, (split + 1) * SPLIT_LEN)) continue;
        constexpr int STEPS = SPLIT_LEN / STEP_LEN;
        walker.walk(split * STEPS, (split + 1) * STEPS, [] {});
        if (queries.num_splits() == 1) {
            walker.write_out();
            continue;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (walker.positions[i] < 0) continue;
            float* const partial = queries.partial(head_group, split, walker.query(i));
#pragma unroll
            for (int n = 0; n < 2 * NUM_VALUE_PARTS; ++n) {
                if (walker.value_dim(n) < call.head_dim) {
                    *reinterpret_cast<float2*>(partial + walker.value_dim(n)) =
                        make_float2(walker.partial.out[n][2 * i], walker.partial.out[n][2 * i + 1]);
                }
            }
            if (walker.value_dim(0) == 0) {
                *reinterpret_cast<float2*>(partial + call.head_dim) =
                    make_float2(walker.partial.max[i], walker.partial.sum[i]);
            }
        }
    }
}
EXPORT_KERNEL(latent_attention_generation)

KERNEL(latent_attention_context, 256, 1)(const __grid_constant__ AttentionCall call) { attend_context<2, 2>(call); }
EXPORT_KERNEL(latent_attention_context)

KERNEL(latent_attention_context_t1, 128, 2)(const __grid_constant__ AttentionCall call) { attend_context<1, 1>(call); }
EXPORT_KERNEL(latent_attention_context_t1)
