// What the kernels of paged attention share: which positions are seen, how tiles of the cache are walked, and how the
// results of splits are merged.
//
// All of them compute a query (one head of one row) by the same operations in the same order, so that its result is the
// same bit for bit in a chunk of the context, in a generation step, among draft tokens, and beside any other rows:
//
//   positions of the sequence   0      64     128    192    256                  512         query
//                               | tile | tile | tile | tile | tile | tile | tile | ... | tile |
//                               |--------- split 0 ---------|------ split 1 -----|- split 2 --|
//
//   tile     scores = q K^T by m16n8k16 over the head's elements in order; max = max(max, scores);
//            p = exp2((scores - max) * scale * log2(e)); sum and out are rescaled; sum += p; out += bf16(p) V
//            (online softmax; Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135)
//   split    starts with max = -inf, sum = 0, out = 0
//   row      splits are merged in ascending order: M' = max(M, max), Out = Out * exp2(M - M') + out * exp2(max - M')
//            (Dao et al., Flash-Decoding, 2023); a head's logit of no position is added to the sum at last
//
// Tiles and splits start at fixed positions. A warp computes 16 queries, and a query's numbers lie in the same four
// lanes and registers whichever row of the warp it is. Positions that a query does not see have the score -inf: they
// change neither its max nor its sum, and add zeros to out. So tiles and splits of which a query sees nothing may be
// walked or skipped: M - M' and max - max' are 0 there, and the factors exactly 1; only the sign of a zero may differ,
// which the output does not keep. Positions that no query of a tile sees are not read: their blocks may be gone, and
// their memory may hold NaN. (A value that is not finite spoils the queries that see it, and those up to 63 positions
// before it that are computed in the same tile.)
//
// Queries are packed by key/value head: query i of a sequence's rows is head i % group of row i / group, where `group`
// query heads share a key/value head; so all queries that need a tile of the cache share its one copy in shared memory:
//
//   group 4        row 0             row 1             row 2             row 3
//   queries        0   1   2   3     4   5   6   7     8   9   10  11    12  13  14  15
//
// An int8 or fp8 cache holds codes that bf16 represents exactly. The scales of keys are multiplied with the scores,
// those of values with p before it is rounded to bf16. A team of warps widens a tile of codes in shared memory, each
// warp a part of it; a single warp widens codes of heads of up to 128 elements in registers. Either way a register of
// four codes becomes a register of the even elements and one of the odd elements, so operands have each 16 elements of
// a head in this order:
//
//   bf16      0  1  2  3  4  5  6  7    8  9  10 11 12 13 14 15
//   codes     0  2  4  6  8  10 12 14   1  3  5  7  9  11 13 15
//
// Where the sinks shift, other queries meet them: the tiles that have sinks are walked with those queries, then the
// tiles that have other positions with the usual ones. So a tile that has both is walked twice, each time without the
// positions of the other kind:
//
//   num_sinks 80   | tile 0, sinks | tile 1, sinks | tile 1, others | tile 2 | ...
#pragma once
#include "fp8.cuh"
#include "tensor_cores.cuh"

// Positions of a tile and of a split, counted from position 0.
constexpr int TILE_LEN = 64;
constexpr int SPLIT_LEN = 256;
// Queries that a warp computes.
constexpr int WARP_QUERIES = 16;

// Whether a cache of these elements, bf16, i8 or e4m3, holds codes with scales.
template <class Element>
constexpr bool HAS_CODES = sizeof(Element) == 1;

// Some queries of one sequence, in device memory. The rows of the sequence are consecutive rows of the step, at
// consecutive positions.
struct alignas(16) AttentionTile {
    // The sequence's first row, and how many it has in this step. 0: an entry that does nothing.
    u32 first_row, num_rows;
    // The first packed query of this tile: a multiple of the queries that a block of the kernel computes.
    u32 first_query;
    // The position of `first_row`.
    u32 position;
    // Where the sequence's blocks begin in `block_tables`.
    u32 block_table;
    // Generation: the split that this entry computes, and where the partial results of the tile begin, in queries.
    u32 split, first_partial;
    // Entries from one of these blocks to the next: those between are of other groups of layers.
    u32 table_stride;
};

// The argument of all kernels of paged attention.
struct AttentionCall {
    // [num_rows][num_q_heads][head_dim]
    bf16* out;
    // Scratch memory of generation, see paged_attention_generation.cu.
    float* partials;
    // [num_rows][num_q_heads][head_dim], rotated.
    const bf16* q;
    // The same for the positions below num_sinks, or null: `q` is.
    const bf16* sink_q;
    // The cache of the layer, [num_blocks][num_kv_heads][block_size][head_dim], bf16 or codes: fewer than 2^32 - 1
    // vectors.
    const void* keys;
    const void* values;
    // Codes: [num_blocks][num_kv_heads][block_size]; bf16: null.
    const float* key_scales;
    const float* value_scales;
    // Blocks of the group of the layer in order of position, with those of other groups between. NOWHERE stands for a
    // block that no query sees.
    const u32* block_tables;
    const AttentionTile* tiles;
    // counts[0]: entries of `tiles`. counts[1], generation: those of split 0, which come first.
    const u32* counts;
    // [num_q_heads], or null: of each head, the logit of no position, which only adds to the sum of weights.
    const float* sink_logits;
    // The factor of the scores, > 0, times log2(e).
    float exponent_scale;
    int num_kv_heads;
    // Query heads of a key/value head.
    int group;
    // Even.
    int head_dim;
    int block_size;
    // position / block_size = __umulhi(2 * position, block_multiplier) >> block_shift.
    u32 block_multiplier, block_shift;
    // The query at position p sees the positions above p - window up to p, and those below num_sinks; 0: all up to p.
    int window, num_sinks;
    // A score s, without its scale, becomes cap / scale * tanh(s * scale / cap): 2 * scale / cap * log2(e), 0 for no
    // cap, and cap / scale.
    float cap_shrink, cap_grow;
    // Latent attention: elements of a query and a key, of which the first head_dim are the value; see
    // latent_attention.cu.
    int key_dim;
    // [num_q_heads], only read by kernels with linear biases: what a score of a head, with its scale, loses for each
    // position that its key is in front of its query (ALiBi; Press et al., arXiv:2108.12409). They are behind the cap.
    const float* slopes;
};

// ------------------------------------------------------------------------------------------- what is seen

// The positions that the queries at positions `first` to `last` see.
struct Sight {
    int first, last;
    // 0: none. Then there is nothing for sinks to add.
    int window, num_sinks;

    __device__ __forceinline__ int window_begin() const { return window > 0 ? max(first - window + 1, 0) : 0; }

    // Whether a query sees a position of from..to.
    __device__ __forceinline__ bool any_sees(int from, int to) const {
        return (from <= last) & ((to > window_begin()) | (from < num_sinks));
    }

    // Whether all queries see all positions of from..to. (No, if some are sinks and others in the window.)
    __device__ __forceinline__ bool all_see(int from, int to) const {
        return to - 1 <= first && (window == 0 || from > last - window || to <= num_sinks);
    }

    // The first tile from `tile` on that a query may see.
    template <int LEN = TILE_LEN>
    __device__ __forceinline__ int next_tile(int tile) const {
        const int from = tile * LEN, begin = window_begin();
        return from >= num_sinks && from + LEN <= begin ? begin / LEN : tile;
    }
};

// Which positions a step of a walk is over.
enum class Met { ALL, SINKS, OTHERS };

// Whether the query at a position, -1 if there is none, sees another position.
__device__ __forceinline__ bool query_sees(const AttentionCall& call, int query, int position) {
    return (position <= query) & ((call.window == 0) | (position > query - call.window) | (position < call.num_sinks));
}

// Whether a query of the warp sees a position of a tile, and whether all queries see all. Each lane knows two of them.
template <int LEN = TILE_LEN>
__device__ __forceinline__ bool warp_sees(const AttentionCall& call, const int (&positions)[2], int tile) {
    bool is_seen = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const Sight sight{positions[i], positions[i], call.window, call.num_sinks};
        is_seen |= sight.any_sees(tile * LEN, (tile + 1) * LEN);
    }
    return __any_sync(ALL_LANES, is_seen);
}

template <int LEN = TILE_LEN>
__device__ __forceinline__ bool warp_sees_all(const AttentionCall& call, const int (&positions)[2], int tile) {
    bool is_seen = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const Sight sight{positions[i], positions[i], call.window, call.num_sinks};
        is_seen &= positions[i] < 0 || sight.all_see(tile * LEN, (tile + 1) * LEN);
    }
    return __all_sync(ALL_LANES, is_seen);
}

// A tile of up to `max_queries` queries, as its entry describes it. Registers are few: the entry is read again where it
// is needed.
struct QueryTile {
    const AttentionCall& call;
    u32 index;
    int num_queries;

    __device__ __forceinline__ QueryTile(const AttentionCall& call, u32 index, int max_queries)
        : call(call), index(index) {
        const long long num_left = static_cast<long long>(entry().num_rows) * call.group - entry().first_query;
        num_queries = static_cast<int>(max(0ll, min(num_left, static_cast<long long>(max_queries))));
    }

    __device__ __forceinline__ const AttentionTile& entry() const { return call.tiles[index]; }

    __device__ __forceinline__ int position(int query) const {
        return static_cast<int>(entry().position + (entry().first_query + query) / call.group);
    }

    // Which of all queries of the step it is.
    __device__ __forceinline__ size_t number(int kv_head, int query) const {
        const u32 packed = entry().first_query + query;
        const size_t row = static_cast<size_t>(entry().first_row) + packed / call.group;
        return (row * call.num_kv_heads + kv_head) * call.group + packed % call.group;
    }

    // Where a query lies in q and out.
    __device__ __forceinline__ size_t offset(int kv_head, int query) const {
        return number(kv_head, query) * call.head_dim;
    }

    // The head of a query.
    __device__ __forceinline__ int head(int kv_head, int query) const {
        return kv_head * call.group + (entry().first_query + query) % call.group;
    }

    // What the queries see. There is at least one.
    __device__ __forceinline__ Sight sight() const {
        return {position(0), position(num_queries - 1), call.window, call.num_sinks};
    }

    __device__ __forceinline__ int num_splits() const { return position(num_queries - 1) / SPLIT_LEN + 1; }

    // The partial result of a query, and the distance to that of the next split, in floats.
    __device__ __forceinline__ float* partial(int kv_head, int split, int query) const {
        const size_t index = static_cast<size_t>(entry().first_partial + query) * call.num_kv_heads + kv_head;
        return call.partials + index * partial_len() + split * split_stride();
    }

    __device__ __forceinline__ size_t split_stride() const {
        return static_cast<size_t>(num_queries) * call.num_kv_heads * partial_len();
    }

    __device__ __forceinline__ int partial_len() const { return (call.head_dim + 9) / 8 * 8; }
};

// --------------------------------------------------------------------------------------------- the merge

// The factors of two results that are merged, and the larger maximum. -inf: a result of no position.
struct MergeFactors {
    float max, total, added;

    __device__ __forceinline__ MergeFactors(float total_max, float added_max, float exponent_scale) {
        max = fmaxf(total_max, added_max);
        const float base = max == -infinity() ? 0.0f : max;
        total = exp2_approx((total_max - base) * exponent_scale);
        added = exp2_approx((added_max - base) * exponent_scale);
    }

    __device__ __forceinline__ float merge(float total_value, float added_value) const {
        return fmaf(total_value, total, added_value * added);
    }
};

// The factor of a query's finished sum; 0 if nothing was seen.
__device__ __forceinline__ float reciprocal_of_sum(const AttentionCall& call, int head, float max, float sum) {
    if (sum == 0.0f) return 0.0f;
    if (call.sink_logits != nullptr) {
        constexpr float LOG2_E = 1.44269504f;
        sum += exp2_approx(fmaf(call.sink_logits[head], LOG2_E, -(max * call.exponent_scale)));
    }
    return __frcp_rn(sum);
}

// Adding 0 makes -0 to 0.
__device__ __forceinline__ float finished(float out, float reciprocal) { return fmaf(out, reciprocal, 0.0f); }

// ------------------------------------------------------------------------------- tiles in shared memory

// A tile in shared memory, [TILE_LEN][ROW_BYTES], in chunks of 16 bytes. The chunks of a row are permuted, by an
// exclusive or with bits of the row's number, so that ldmatrix reads eight rows without bank conflicts.
template <int ROW_BYTES>
struct Chunks {
    static_assert(ROW_BYTES % 32 == 0);
    static constexpr int PER_ROW = ROW_BYTES / 16;
    // The bits of a chunk's number that are permuted: as many as there are in all rows.
    static constexpr int PERMUTED = PER_ROW % 8 == 0 ? 7 : PER_ROW % 4 == 0 ? 3 : 1;

    // The place of a chunk.
    static __device__ __forceinline__ int place(int row, int chunk) {
        return row * PER_ROW + (chunk ^ (row / (8 / (PERMUTED + 1)) & PERMUTED));
    }
};

// Whether registers are left for addresses.
template <int D, class Element>
constexpr bool KEEPS_ADDRESSES = D <= 128 || !HAS_CODES<Element>;

// The addresses of the chunks behind one that is the first or the second of its row.
template <int ROW_BYTES, bool ARE_KEPT>
struct ChunkAddresses {
    using Tile = Chunks<ROW_BYTES>;
    static constexpr int PERMUTED = Tile::PERMUTED;
    // Of this chunk and those 2, 4, ... chunks after it, as many as are permuted among themselves.
    SharedAddress permuted[(PERMUTED + 1) / 2];

    __device__ __forceinline__ ChunkAddresses(const unsigned char* tile, int row, int chunk) {
        const int place = Tile::place(row, chunk);
#pragma unroll
        for (int i = 0; i <= PERMUTED / 2; ++i) {
            const SharedAddress address = shared_address(tile + 16 * (place ^ (2 * i)));
            permuted[i] = ARE_KEPT ? kept(address) : address;
        }
    }

    // The chunk that is `num_rows` rows, a multiple of 8, and `num_chunks` chunks, an even number, after this one.
    __device__ __forceinline__ SharedAddress after(int num_rows, int num_chunks) const {
        return permuted[(num_chunks & PERMUTED) / 2] + 16 * (num_rows * Tile::PER_ROW + (num_chunks & ~PERMUTED));
    }
};

// The block of a sequence that holds a position.
__device__ __forceinline__ u32 block_index(const AttentionCall& call, u32 position) {
    return __umulhi(2 * position, call.block_multiplier) >> call.block_shift;
}

// What a block has of shared memory, in bytes.
template <int D, int NUM_WARPS, class Element>
struct SharedLayout {
    // Whether codes are widened in registers. A warp of a team would widen what the others do, too; and large heads
    // leave no registers for it before sm_90.
    static constexpr bool READS_CODES = HAS_CODES<Element> && NUM_WARPS == 1 && D <= 128;
    static constexpr bool WIDENS_TILES = HAS_CODES<Element> && !READS_CODES;
    // bf16:     | keys | values |
    // codes:    | widened keys or values, if WIDENS_TILES | codes of keys | codes of values | scales of both |
    static constexpr int KEY_BYTES = TILE_LEN * D * sizeof(Element);
    static constexpr int KEYS = WIDENS_TILES ? TILE_LEN * D * 2 : 0;
    static constexpr int VALUES = KEYS + KEY_BYTES;
    static constexpr int SCALES = VALUES + KEY_BYTES;
    // Queries that have no room in registers.
    static constexpr bool KEEPS_QUERIES = D > 128;
    static constexpr int QUERIES = SCALES + (HAS_CODES<Element> ? TILE_LEN * 8 : 0);
    // The running totals of the splits, if there are any.
    static constexpr int TOTALS = QUERIES + (KEEPS_QUERIES ? NUM_WARPS * WARP_QUERIES * D * 2 : 0);
};

// A barrier of the threads that share tiles.
template <int NUM_WARPS>
__device__ __forceinline__ void team_barrier() {
    if constexpr (NUM_WARPS == 1) {
        __syncwarp();
    } else {
        __syncthreads();
    }
}

// The positions of a tile, as the lanes of each warp find them: lane l looks after positions l and l + 32.
struct TileSource {
    // The blocks of the positions. The loads end while other things are computed.
    u32 blocks[2];
    // Indices into [num_blocks][num_kv_heads][block_size]; NOWHERE: not read.
    u32 vectors[2];

    __device__ __forceinline__ void find_blocks(const AttentionCall& call, const AttentionTile& entry, const Sight& sight,
                                                int tile) {
        const u32* const table = call.block_tables + entry.block_table;
        const u32 stride = entry.table_stride;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int position = position_of(tile, half);
            blocks[half] = NOWHERE;
            if (sight.any_sees(position, position + 1)) blocks[half] = table[block_index(call, position) * stride];
        }
    }

    __device__ __forceinline__ void find_vectors(const AttentionCall& call, int kv_head, int tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 position = position_of(tile, half), index = block_index(call, position);
            // The first position of the block is at (block * num_kv_heads + kv_head) * block_size.
            const u32 vector = (blocks[half] * call.num_kv_heads + kv_head - index) * call.block_size + position;
            vectors[half] = blocks[half] == NOWHERE ? NOWHERE : vector;
        }
    }

    static __device__ __forceinline__ int position_of(int tile, int half) {
        return tile * TILE_LEN + half * WARP_SIZE + threadIdx.x % WARP_SIZE;
    }
};

// The scales of the lane's positions.
struct TileScales {
    float keys[2], values[2];

    __device__ __forceinline__ void load(const AttentionCall& call, const TileSource& source) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 vector = source.vectors[half];
            keys[half] = vector != NOWHERE ? call.key_scales[vector] : 0.0f;
            values[half] = vector != NOWHERE ? call.value_scales[vector] : 0.0f;
        }
    }

    // Writes those of all keys, then those of all values.
    __device__ __forceinline__ void store(float* scales) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int place = half * WARP_SIZE + threadIdx.x % WARP_SIZE;
            scales[place] = keys[half];
            scales[TILE_LEN + place] = values[half];
        }
    }
};

// How far the loops that copy and widen tiles are unrolled: large heads leave few registers for addresses, and NVRTC
// spills some with other numbers.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <int D, class Element>
constexpr int COPY_UNROLL = D <= 128 ? 8 : 4;
template <int D>
constexpr int WIDEN_UNROLL = D <= 128 ? 8 : 1;
#else
template <int D, class Element>
constexpr int COPY_UNROLL = D <= 128 ? 8 : HAS_CODES<Element> ? 2 : 1;
template <int D>
constexpr int WIDEN_UNROLL = D <= 64 ? 1 : 2;
#endif

// What a thread copies of a tile with rows of COLUMNS columns, in the iteration that begins at column `begin` of the
// whole tile.
template <int COLUMNS, int NUM_THREADS>
struct Spot {
    // Then an iteration adds a constant to the row.
    static constexpr bool HAS_WHOLE_ROWS = NUM_THREADS % COLUMNS == 0;
    u32 row, column;
    bool is_in_second_half;

    __device__ __forceinline__ Spot(int begin, u32 thread) {
        row = HAS_WHOLE_ROWS ? begin / COLUMNS + thread / COLUMNS : (begin + thread) / COLUMNS;
        column = HAS_WHOLE_ROWS ? thread % COLUMNS : (begin + thread) % COLUMNS;
        constexpr int HALF = WARP_SIZE * COLUMNS;
        is_in_second_half = begin + (HALF % NUM_THREADS == 0 ? 0 : thread / WARP_SIZE * WARP_SIZE) >= HALF;
    }

    // The vector of the row. All lanes of a warp ask at once, for rows of the same half.
    __device__ __forceinline__ u32 vector(const TileSource& source) const {
        return __shfl_sync(ALL_LANES, is_in_second_half ? source.vectors[1] : source.vectors[0], row % WARP_SIZE);
    }
};

// Begins to copy a tile of keys or values to shared memory: [TILE_LEN][D], elements from head_dim on and rows without a
// vector are zeros, in the order of Chunks; codes that are widened in shared memory lie in their own order.
template <int D, int NUM_WARPS, class Element>
__device__ __forceinline__ void copy_tile(unsigned char* to, const void* from, const TileSource& source, int head_dim) {
    constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE, ELEMENT = sizeof(Element);
    constexpr bool IS_IN_ORDER = SharedLayout<D, NUM_WARPS, Element>::WIDENS_TILES;
    using Tile = Chunks<D * ELEMENT>;
    const u32 vector_bytes = head_dim * ELEMENT;
    const unsigned char* const cache = static_cast<const unsigned char*>(from);
    const u32 thread = NUM_WARPS == 1 ? threadIdx.x % WARP_SIZE : threadIdx.x;
    if (vector_bytes % 16 == 0) {
        constexpr int CHUNKS = Tile::PER_ROW;
        // Eight rows on, chunks are permuted alike.
        constexpr bool ARE_ALIKE = IS_IN_ORDER || NUM_THREADS / CHUNKS % 8 == 0;
        const auto place = [=](u32 row, u32 column) {
            return 16 * (IS_IN_ORDER ? row * CHUNKS + column : static_cast<u32>(Tile::place(row, column)));
        };
        const Spot<CHUNKS, NUM_THREADS> first(0, thread);
        const SharedAddress unkept_place = shared_address(to + place(first.row, first.column));
        const SharedAddress first_place = KEEPS_ADDRESSES<D, Element> ? kept(unkept_place) : unkept_place;
        const unsigned char* const first_column = kept(cache + (first.column * 16 < vector_bytes ? first.column * 16 : 0));
#pragma unroll(COPY_UNROLL<D, Element>)
        for (int begin = 0; begin < TILE_LEN * CHUNKS; begin += NUM_THREADS) {
            const Spot<CHUNKS, NUM_THREADS> spot(begin, thread);
            const u32 vector = spot.vector(source);
            const bool is_in_vector = spot.column * 16 < vector_bytes;
            const bool is_read = (vector != NOWHERE) & is_in_vector;
            const unsigned char* const column =
                spot.HAS_WHOLE_ROWS && D <= 128 ? first_column : cache + (is_in_vector ? spot.column * 16 : 0);
            cp_async_16_or_zeros(ARE_ALIKE ? first_place + 16 * begin : shared_address(to + place(spot.row, spot.column)),
                                 column + static_cast<u64>(is_read ? vector : 0) * vector_bytes, is_read);
        }
    } else {
        // Vectors that do not begin at multiples of 16 bytes are copied in pairs of elements, and at once: the barrier
        // after the wait for asynchronous copies orders these as well.
        constexpr int PAIRS = D / 2, PAIRS_OF_CHUNK = 8 / ELEMENT;
#pragma unroll 1
        for (int begin = 0; begin < TILE_LEN * PAIRS; begin += NUM_THREADS) {
            const Spot<PAIRS, NUM_THREADS> spot(begin, thread);
            const u32 vector = spot.vector(source), pair = spot.column;
            const bool is_read = vector != NOWHERE && 2 * pair < static_cast<u32>(head_dim);
            const size_t offset = static_cast<size_t>(vector) * vector_bytes + 2 * pair * ELEMENT;
            const u32 chunk = Tile::place(spot.row, pair / PAIRS_OF_CHUNK);
            const u32 place = IS_IN_ORDER ? begin + thread : chunk * PAIRS_OF_CHUNK + pair % PAIRS_OF_CHUNK;
            if constexpr (HAS_CODES<Element>) {
                reinterpret_cast<u16*>(to)[place] = is_read ? *reinterpret_cast<const u16*>(cache + offset) : u16(0);
            } else {
                reinterpret_cast<u32*>(to)[place] = is_read ? *reinterpret_cast<const u32*>(cache + offset) : 0;
            }
        }
    }
}

// Widens a tile of codes to bf16: for each 16 elements, a chunk of the even ones, then a chunk of the odd ones.
template <int D, int NUM_WARPS, class Element>
__device__ __forceinline__ void widen_tile(unsigned char* to, const unsigned char* codes) {
    constexpr int CHUNKS = D / 16;
#pragma unroll(WIDEN_UNROLL<D>)
    for (int begin = 0; begin < TILE_LEN * CHUNKS; begin += NUM_WARPS * WARP_SIZE) {
        const int index = begin + threadIdx.x, row = index / CHUNKS, chunk = index % CHUNKS;
        const uint4 words = reinterpret_cast<const uint4*>(codes)[index];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const auto widened = [=](u32 word) { return widen_codes<Element>(word >> 8 * odd); };
            reinterpret_cast<uint4*>(to)[Chunks<2 * D>::place(row, 2 * chunk + odd)] =
                make_uint4(widened(words.x), widened(words.y), widened(words.z), widened(words.w));
        }
    }
}

// ---------------------------------------------------------------------------------- the queries of a warp

// The 16 queries of a warp as operands of mma_bf16: lane l holds elements of the queries l / 4 and l / 4 + 8.
template <int D, int NUM_WARPS, class Element, bool IS_IN_REGISTERS_>
struct Queries {
    static constexpr bool IS_IN_REGISTERS = IS_IN_REGISTERS_;
    static constexpr int NUM_STEPS = D / 16;
    u32 words[IS_IN_REGISTERS ? NUM_STEPS : 1][4];
    // Else [NUM_STEPS][threads of the block] in shared memory.
    unsigned char* room;

    __device__ __forceinline__ explicit Queries(unsigned char* room) : room(room) {}

    // Queries that are null are zeros.
    __device__ __forceinline__ void load(const bf16* const (&q)[2], int head_dim) {
#pragma unroll
        for (int step = 0; step < NUM_STEPS; ++step) {
            u32 a[4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const auto pair = [=](int dim) {
                    return q[i] != nullptr && dim < head_dim ? *reinterpret_cast<const u32*>(q[i] + dim) : 0;
                };
                const int t = threadIdx.x % 4;
                if constexpr (HAS_CODES<Element>) {
                    const u32 low = pair(step * 16 + 4 * t), high = pair(step * 16 + 4 * t + 2);
                    a[i] = __byte_perm(low, high, 0x5410), a[i + 2] = __byte_perm(low, high, 0x7632);
                } else {
                    a[i] = pair(step * 16 + 2 * t), a[i + 2] = pair(step * 16 + 8 + 2 * t);
                }
            }
            if constexpr (IS_IN_REGISTERS) {
#pragma unroll
                for (int i = 0; i < 4; ++i) words[step][i] = a[i];
            } else {
                stored(step) = make_uint4(a[0], a[1], a[2], a[3]);
            }
        }
    }

    __device__ __forceinline__ uint4& stored(int step) const {
        return reinterpret_cast<uint4*>(room)[step * NUM_WARPS * WARP_SIZE + threadIdx.x];
    }

    __device__ __forceinline__ void get(int step, u32 (&a)[4]) const {
        if constexpr (IS_IN_REGISTERS) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = words[step][i];
        } else {
            const uint4 x = stored(step);
            a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
        }
    }
};

// The running result of a split. Lane l has of the queries l / 4 and l / 4 + 8 (index 0 and 1): the max, the sum of its
// own columns, and the elements 8n + 2(l % 4) and the next one, in out[n][0..2] and out[n][2..4]. With a cache of
// codes, out[2m] has the elements 16m + 4(l % 4) and the second one after it, and out[2m + 1] the odd elements that
// follow these.
template <int D>
struct Partial {
    float max[2], sum[2];
    float out[D / 8][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            max[i] = -infinity();
            sum[i] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) out[n][i] = 0.0f;
        }
    }

    // Adds up the sums of the four lanes of a query.
    __device__ __forceinline__ void finish_sums() {
#pragma unroll
        for (int i = 0; i < 2; ++i) sum[i] = group_sum(sum[i], 4);
    }
};

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
        partial.max[0] = first.max, partial.max[1] = second.max;
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

// The scores of a tile of keys: lane l has of the queries l / 4 and l / 4 + 8 the positions 8n + 2(l % 4) and the next
// one.
constexpr int NUM_SCORES = TILE_LEN / 8;

__device__ __forceinline__ void clear_scores(float (&scores)[NUM_SCORES][4]) {
#pragma unroll
    for (int n = 0; n < NUM_SCORES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
    }
}

template <int D, class Element, class Q>
__device__ __forceinline__ void multiply_keys(float (&scores)[NUM_SCORES][4], const Q& queries, const unsigned char* keys) {
    const int lane = threadIdx.x % WARP_SIZE;
    const ChunkAddresses<2 * D, KEEPS_ADDRESSES<D, Element>> chunks(keys, lane / 16 * 8 + lane % 8, lane / 8 % 2);
    clear_scores(scores);
#pragma unroll(Q::IS_IN_REGISTERS ? D / 16 : 4)
    for (int step = 0; step < D / 16; ++step) {
        u32 a[4];
        queries.get(step, a);
#pragma unroll
        for (int n = 0; n < NUM_SCORES; n += 2) {
            // Matrices 0 and 1: the elements of positions 8n..8n+8; 2 and 3: those of the next eight.
            u32 b[4];
            ldmatrix_x4(b, chunks.after(8 * n, 2 * step));
            mma_bf16(scores[n], a, {b[0], b[1]});
            mma_bf16(scores[n + 1], a, {b[2], b[3]});
        }
    }
}

// The same with a tile of codes: ldmatrix takes two of them for one element of 16 bits.
template <int D, class Element, class Q>
__device__ __forceinline__ void multiply_key_codes(float (&scores)[NUM_SCORES][4], const Q& queries,
                                                   const unsigned char* keys) {
    const int lane = threadIdx.x % WARP_SIZE;
    const ChunkAddresses<D, true> chunks(keys, lane / 16 * 8 + lane % 8, lane / 8 % 2);
    clear_scores(scores);
#pragma unroll(D / 32)
    for (int pair = 0; pair < D / 32; ++pair) {
        u32 a[2][4];
        queries.get(2 * pair, a[0]);
        queries.get(2 * pair + 1, a[1]);
#pragma unroll
        for (int n = 0; n < NUM_SCORES; n += 2) {
            // Matrices 0 and 1: positions 8n..8n+8, 16 elements each; 2 and 3: the next eight positions. Of a position,
            // a lane has the elements 4(l % 4) to 4(l % 4) + 3.
            u32 codes[4];
            ldmatrix_x4(codes, chunks.after(8 * n, 2 * pair));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                mma_bf16(scores[n + i / 2], a[i % 2], {widen_codes<Element>(codes[i]), widen_codes<Element>(codes[i] >> 8)});
            }
        }
    }
}

// The linear biases of the scores of the lane's two queries, if there are any.
template <bool HAS_SLOPES>
struct LinearBiases {
    __device__ __forceinline__ void load(const AttentionCall&, int, int) {}

    template <int NUM_SCORES>
    __device__ __forceinline__ void add_to(float (&)[NUM_SCORES][4], const int (&)[2], int) const {}
};

template <>
struct LinearBiases<true> {
    // What a score loses for each position, before it is scaled.
    float slopes[2];

    // Of query `i`.
    __device__ __forceinline__ void load(const AttentionCall& call, int i, int head) {
        constexpr float LOG2_E = 1.44269504f;
        slopes[i] = call.slopes[head] * (LOG2_E * __frcp_rn(call.exponent_scale));
    }

    // `first`: the position of the lane's first score. Distances are exact up to 2^24 positions.
    template <int NUM_SCORES>
    __device__ __forceinline__ void add_to(float (&scores)[NUM_SCORES][4], const int (&positions)[2], int first) const {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float distance = static_cast<float>(first - positions[row]);
#pragma unroll
            for (int n = 0; n < NUM_SCORES; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = scores[n][2 * row + i];
                    score = fmaf(slopes[row], distance + static_cast<float>(8 * n + i), score);
                }
            }
        }
    }
};

// Adds the scores to the max and the sum of each query, and makes them weights of values.
// `scales` are those of a cache of codes, of the tile's keys and of its values.
template <int D, class Element, int NUM_SCORES, bool HAS_SLOPES = false>
__device__ __forceinline__ void softmax(u32 (&weights)[NUM_SCORES][2], Partial<D>& partial,
                                        float (&scores)[NUM_SCORES][4], const float* scales, int tile,
                                        const int (&positions)[2], const AttentionCall& call, Met met = Met::ALL,
                                        const LinearBiases<HAS_SLOPES>& biases = {}) {
    constexpr int LEN = 8 * NUM_SCORES;
    const float exponent_scale = call.exponent_scale;
    const int column = threadIdx.x % 4 * 2;
    if constexpr (HAS_CODES<Element>) {
#pragma unroll
        for (int n = 0; n < NUM_SCORES; ++n) {
            const float2 pair = *reinterpret_cast<const float2*>(scales + 8 * n + column);
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[n][i] *= i % 2 == 0 ? pair.x : pair.y;
        }
    }
    if (call.cap_shrink > 0.0f) {
        // tanh(x) = 1 - 2 / (1 + e^2x).
#pragma unroll
        for (int n = 0; n < NUM_SCORES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float e = exp2_approx(scores[n][i] * call.cap_shrink);
                scores[n][i] = call.cap_grow * (1.0f - __fdividef(2.0f, 1.0f + e));
            }
        }
    }
    const int from = tile * LEN;
    biases.add_to(scores, positions, from + column);
    const bool has_both = met != Met::ALL && from < call.num_sinks && from + LEN > call.num_sinks;
    if (has_both || !warp_sees_all<LEN>(call, positions, tile)) {
#pragma unroll
        for (int n = 0; n < NUM_SCORES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int position = from + 8 * n + column + i % 2;
                const bool is_met = (met == Met::ALL) | ((position < call.num_sinks) == (met == Met::SINKS));
                const bool is_seen = is_met & query_sees(call, positions[i / 2], position);
                scores[n][i] = is_seen ? scores[n][i] : -infinity();
            }
        }
    }
    float rescale[2], offset[2], sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        float new_max = -infinity();
#pragma unroll
        for (int n = 0; n < NUM_SCORES; ++n) {
            new_max = fmaxf(new_max, fmaxf(scores[n][2 * row], scores[n][2 * row + 1]));
        }
        new_max = fmaxf(partial.max[row], group_max(new_max, 4));
        const float base = new_max == -infinity() ? 0.0f : new_max;
        rescale[row] = exp2_approx((partial.max[row] - base) * exponent_scale);
        offset[row] = -(base * exponent_scale);
        partial.max[row] = new_max;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
            partial.out[n][2 * row] *= rescale[row];
            partial.out[n][2 * row + 1] *= rescale[row];
        }
    }
#pragma unroll
    for (int n = 0; n < NUM_SCORES; ++n) {
        float2 value_scales = make_float2(1.0f, 1.0f);
        if constexpr (HAS_CODES<Element>) {
            value_scales = *reinterpret_cast<const float2*>(scales + LEN + 8 * n + column);
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float p[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                p[i] = exp2_approx(fmaf(scores[n][2 * row + i], exponent_scale, offset[row]));
                sums[row] += p[i];
            }
            // Multiplication by one changes no bit.
            weights[n][row] = to_bf16_pair(p[0] * value_scales.x, p[1] * value_scales.y);
        }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) partial.sum[row] = fmaf(partial.sum[row], rescale[row], sums[row]);
}

template <int D, class Element>
__device__ __forceinline__ void multiply_values(Partial<D>& partial, const u32 (&weights)[NUM_SCORES][2],
                                                const unsigned char* values) {
    const int lane = threadIdx.x % WARP_SIZE;
    const ChunkAddresses<2 * D, KEEPS_ADDRESSES<D, Element>> chunks(values, lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < TILE_LEN / 16; ++step) {
        const u32 a[4] = {weights[2 * step][0], weights[2 * step][1], weights[2 * step + 1][0], weights[2 * step + 1][1]};
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            // Matrices 0 and 1: the next 16 positions for elements 8n..8n+8; 2 and 3: for the next eight.
            u32 b[4];
            ldmatrix_x4_transposed(b, chunks.after(16 * step, n));
            mma_bf16(partial.out[n], a, {b[0], b[1]});
            mma_bf16(partial.out[n + 1], a, {b[2], b[3]});
        }
    }
}

// The same with a tile of codes.
template <int D, class Element>
__device__ __forceinline__ void multiply_value_codes(Partial<D>& partial, const u32 (&weights)[NUM_SCORES][2],
                                                     const unsigned char* values) {
    const int lane = threadIdx.x % WARP_SIZE;
    const ChunkAddresses<D, true> chunks(values, lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < TILE_LEN / 16; ++step) {
        const u32 a[4] = {weights[2 * step][0], weights[2 * step][1], weights[2 * step + 1][0], weights[2 * step + 1][1]};
#pragma unroll
        for (int n = 0; n < D / 8; n += 4) {
            // Matrices 0 and 1: the next 16 positions for elements 8n..8n+16; 2 and 3: for the next 16. A lane has the
            // elements 2(l / 4) and the next one of two positions.
            u32 codes[4];
            ldmatrix_x4_transposed(codes, chunks.after(16 * step, n / 2));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int odd = i % 2, first = i / 2 * 2;
                const u32 low = codes[first] >> 8 * odd, high = codes[first + 1] >> 8 * odd;
                mma_bf16(partial.out[n + i], a, {widen_codes<Element>(low), widen_codes<Element>(high)});
            }
        }
    }
}

// ------------------------------------------------------------------------------------------- the walk

// The queries of a warp, and what it knows of them.
template <int D, int NUM_WARPS, class Element, bool HAS_SLOPES = false>
struct Walker {
    using Layout = SharedLayout<D, NUM_WARPS, Element>;
    static constexpr int BLOCK_QUERIES = NUM_WARPS * WARP_QUERIES;

    const AttentionCall& call;
    const QueryTile& tile_of_queries;
    const int kv_head;
    unsigned char* const shared;
    // The positions of the lane's two queries. Those beyond the last one are at -1, and see nothing.
    int positions[2];
    LinearBiases<HAS_SLOPES> biases;
    // What the queries of the block see.
    Sight sight;
    Partial<D> partial;

    __device__ __forceinline__ Walker(const AttentionCall& call, const QueryTile& tile_of_queries, int kv_head,
                                      unsigned char* shared)
        : call(call), tile_of_queries(tile_of_queries), kv_head(kv_head), shared(shared) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            positions[i] = query(i) < tile_of_queries.num_queries ? tile_of_queries.position(query(i)) : -1;
            biases.load(call, i, tile_of_queries.head(kv_head, query(i)));
        }
        sight = tile_of_queries.sight();
        partial.clear();
    }

    // Query `i` of the lane.
    static __device__ __forceinline__ int query(int i) {
        const int warp = NUM_WARPS == 1 ? 0 : threadIdx.x / WARP_SIZE;
        return warp * WARP_QUERIES + threadIdx.x % WARP_SIZE / 4 + 8 * i;
    }

    // Adds the tiles from..to to `partial`, and calls at_split_end() between two tiles of different splits; the sums of
    // `partial` are finished then and at the end. All threads of the block call it.
    template <class AtSplitEnd>
    __device__ __forceinline__ void walk(int from, int to, AtSplitEnd at_split_end) {
        to = min(to, sight.last / TILE_LEN + 1);
        int next = sight.next_tile(from);
        if (next >= to) return;
        Met met = Met::ALL;
        if (call.sink_q != nullptr) met = next * TILE_LEN < call.num_sinks ? Met::SINKS : Met::OTHERS;

        unsigned char* const keys = shared + Layout::KEYS;
        unsigned char* const values = shared + Layout::VALUES;
        float* const scales = reinterpret_cast<float*>(shared + Layout::SCALES);
        Queries<D, NUM_WARPS, Element, !Layout::KEEPS_QUERIES> queries_of_warp(shared + Layout::QUERIES);
        const auto load_queries = [&] {
            const bf16* q[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bf16* const first = met == Met::SINKS ? call.sink_q : call.q;
                q[i] = positions[i] < 0 ? nullptr : first + tile_of_queries.offset(kv_head, query(i));
            }
            queries_of_warp.load(q, call.head_dim);
        };
        load_queries();

        // A copy may begin when nobody reads any more what it overwrites. A team of warps knows that behind a barrier.
        // It has one in front of each product anyway, so its copies begin there: two barriers a tile. A single warp
        // begins a copy right behind the product that has read its place, and so has two of them in flight.
        constexpr bool IS_TEAM = NUM_WARPS > 1;
        constexpr int NUM_LATER = IS_TEAM ? 0 : 1;
        // Of the tile `next`. Large heads leave no registers for blocks that are found early.
        constexpr bool IS_EARLY = D <= 128;
        TileSource source;
        const auto find_blocks = [&] {
            if (next < to) source.find_blocks(call, tile_of_queries.entry(), sight, next);
        };
        const auto copy_keys = [&] {
            if (!IS_EARLY) find_blocks();
            if (next < to) {
                source.find_vectors(call, kv_head, next);
                copy_tile<D, NUM_WARPS, Element>(keys, call.keys, source, call.head_dim);
            }
            cp_async_commit();
        };
        const auto copy_values = [&] {
            if (next < to) copy_tile<D, NUM_WARPS, Element>(values, call.values, source, call.head_dim);
            cp_async_commit();
        };
        const bool copies_scales = HAS_CODES<Element> && threadIdx.x < WARP_SIZE;
        TileScales next_scales;
        if (IS_EARLY) find_blocks();
        copy_keys();
        if (copies_scales) {
            next_scales.load(call, source);
            next_scales.store(scales);
        }
        if (!IS_TEAM) copy_values();
        while (true) {
            cp_async_wait<NUM_LATER>();
            team_barrier<NUM_WARPS>();
            if (IS_TEAM) copy_values();
            const int tile = next;
            // The last tile of the sinks is walked again if it has other positions.
            const bool is_again = met == Met::SINKS && (tile + 1) * TILE_LEN > call.num_sinks;
            next = sight.next_tile(is_again ? tile : tile + 1);
            if (IS_EARLY) find_blocks();
            if constexpr (Layout::WIDENS_TILES) {
                widen_tile<D, NUM_WARPS, Element>(shared, keys);
                team_barrier<NUM_WARPS>();
            }
            const bool is_seen = warp_sees(call, positions, tile);
            float scores[NUM_SCORES][4];
            if (is_seen) {
                if constexpr (Layout::READS_CODES) {
                    multiply_key_codes<D, Element>(scores, queries_of_warp, keys);
                } else {
                    multiply_keys<D, Element>(scores, queries_of_warp, shared);
                }
            }
            if (!IS_TEAM) {
                team_barrier<NUM_WARPS>();
                copy_keys();
            }
            u32 weights[NUM_SCORES][2];
            if (is_seen) {
                softmax<D, Element>(weights, partial, scores, scales, tile, positions, call, met, biases);
            }
            cp_async_wait<NUM_LATER>();
            team_barrier<NUM_WARPS>();
            if constexpr (Layout::WIDENS_TILES) {
                widen_tile<D, NUM_WARPS, Element>(shared, values);
                team_barrier<NUM_WARPS>();
            }
            if (IS_TEAM) copy_keys();
            if (copies_scales && next < to) next_scales.load(call, source);
            if (is_seen) {
                if constexpr (Layout::READS_CODES) {
                    multiply_value_codes<D, Element>(partial, weights, values);
                } else {
                    multiply_values<D, Element>(partial, weights, Layout::WIDENS_TILES ? shared : values);
                }
            }
            if (next >= to) break;
            if (copies_scales) next_scales.store(scales);
            if (!IS_TEAM) {
                team_barrier<NUM_WARPS>();
                copy_values();
            }
            if (next * TILE_LEN / SPLIT_LEN != tile * TILE_LEN / SPLIT_LEN) {
                partial.finish_sums();
                at_split_end();
                partial.clear();
            }
            if (met == Met::SINKS && (next == tile || next * TILE_LEN >= call.num_sinks)) {
                met = Met::OTHERS;
                load_queries();
            }
        }
        partial.finish_sums();
    }

    // Writes the finished results of this lane.
    __device__ __forceinline__ void write_out() const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (positions[i] < 0) continue;
            bf16* const out = call.out + tile_of_queries.offset(kv_head, query(i));
            const float reciprocal =
                reciprocal_of_sum(call, tile_of_queries.head(kv_head, query(i)), partial.max[i], partial.sum[i]);
            for_pairs(i, [&](int dim, float x, float y) {
                *reinterpret_cast<u32*>(out + dim) = to_bf16_pair(finished(x, reciprocal), finished(y, reciprocal));
            });
        }
    }

    // Calls use(dim, x, y) with elements dim and dim + 1 of the lane's query `i`, for all that it has.
    template <class Use>
    __device__ __forceinline__ void for_pairs(int i, Use use) const {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            const float(&x)[4] = partial.out[n];
            const float(&y)[4] = partial.out[n + 1];
            const int first = 8 * n + (HAS_CODES<Element> ? 4 : 2) * t, second = first + (HAS_CODES<Element> ? 2 : 8);
            if (first < call.head_dim) use(first, x[2 * i], HAS_CODES<Element> ? y[2 * i] : x[2 * i + 1]);
            if (second < call.head_dim) use(second, HAS_CODES<Element> ? x[2 * i + 1] : y[2 * i], y[2 * i + 1]);
        }
    }
};
