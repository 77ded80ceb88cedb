// Copies the first positions of blocks of the KV cache to other blocks, in all layers: for sequences that fork.
//
//   cache                    the memory of all layers
//   regions [num_regions]    its arrays: keys, values and their scales, of each layer. Each is
//                            [num_blocks][num_heads][block_size][bytes of a position]; written once, when the cache is made
//   copies [num_copies]      what to copy. Targets are different, and none of them is the source of another copy: blocks
//                            of the grid run in any order
//
// Grid (num_regions * num_heads, num_copies). The positions of a head are consecutive:
//
//   | head 0: position 0, 1, ... | head 1: position 0, 1, ... | ...     a block of a region
//   |<- copied ->|               |<- copied ->|
//
// Reads and writes each byte once, in units of 16 bytes where all addresses and lengths allow it, else of 4 bytes or 1.
// No shared memory.
#include "common.cuh"

struct KvRegion {
    // Where it begins in the cache, in bytes.
    u64 offset;
    // Bytes of one position of one head, and of all positions of one head.
    u64 position_bytes;
    u64 head_bytes;
};

struct BlockCopy {
    u32 source;
    u32 target;
    u32 num_positions;
};

namespace {

template <class Unit>
__device__ __forceinline__ void copy(u8* to, const u8* from, u64 num_bytes) {
    Unit* const target = reinterpret_cast<Unit*>(to);
    const Unit* const source = reinterpret_cast<const Unit*>(from);
    for (u64 i = threadIdx.x; i < num_bytes / sizeof(Unit); i += blockDim.x) target[i] = source[i];
}

}  // namespace

KERNEL(copy_positions, 1024)
(u8* __restrict__ cache, const KvRegion* __restrict__ regions, const BlockCopy* __restrict__ copies, int num_heads) {
    const KvRegion region = regions[blockIdx.x / num_heads];
    const BlockCopy what = copies[blockIdx.y];
    const u64 head = blockIdx.x % num_heads;
    const u64 source = (what.source * static_cast<u64>(num_heads) + head) * region.head_bytes;
    const u64 target = (what.target * static_cast<u64>(num_heads) + head) * region.head_bytes;
    const u64 num_bytes = what.num_positions * region.position_bytes;
    u8* const to = cache + region.offset + target;
    const u8* const from = cache + region.offset + source;
    const u64 alignment = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | num_bytes;
    if (alignment % 16 == 0) {
        copy<uint4>(to, from, num_bytes);
    } else if (alignment % 4 == 0) {
        copy<u32>(to, from, num_bytes);
    } else {
        copy<u8>(to, from, num_bytes);
    }
}
EXPORT_KERNEL(copy_positions)
