// Matrices of 8-bit and 4-bit codes, and how they are packed for the tensor cores. Codes are integers, e4m3 numbers
// (fp8.cuh), of which none is NaN, or twice an e2m1 number (OCP Microscaling Formats, 1.0): 0, 1, 2, 3, 4, 6, 8, 12,
// and their negatives.
//
// A weight of row i in column j is scale * code + offset. Scale and offset are those of the row's group of `group_size`
// consecutive columns, a multiple of 32, or the whole row; the last group may be shorter. In the products the matrix is
// the first operand, so that the second one has as few as 8 rows of activations: out[row][i] = sum of weight[i][j] *
// x[row][j].
//
// Codes are packed in tiles of 16 rows and 64 columns (4 bits) or 32 columns (8 bits), each of 512 bytes: 16 for each
// lane of a warp, which it reads at once and which are its part of the operand (mma_bf16's `a`) after unpacking. Tiles
// of the same 16 rows follow each other:
//
//   codes [ceil(n / 16)][ceil(k / tile_columns)][32 lanes][4 words of 32 bits]
//
// Lane l, with g = l / 4 and t = l % 4, has codes of rows g and g + 8. The columns of a product may come in any order,
// as long as that of the activations is the same: here lane t has 8 consecutive ones of each 32, so that it reads
// activations by 16 bytes too. Of these, step s = 0, 1 takes c, c + 1, c + 2, c + 3, where c = 8t + 4s:
//
//   4 bits, code + 8      word w, of columns 32 * (w / 2) + c, s = w % 2
//   or e2m1
//     bits 0-3   row g,     column c        bits 16-19   row g,     column c + 1
//     bits 4-7   row g + 8, column c        bits 20-23   row g + 8, column c + 1
//     bits 8-11  row g,     column c + 2    bits 24-27   row g,     column c + 3
//     bits 12-15 row g + 8, column c + 2    bits 28-31   row g + 8, column c + 3
//
//   8 bits, signed or     words 2s and 2s + 1
//   e4m3
//     word 2s:     byte 0: row g, column c          byte 1: row g + 8, column c
//                  byte 2: row g, column c + 1      byte 3: row g + 8, column c + 1
//     word 2s + 1: the same with columns c + 2 and c + 3
//
// Rows and columns that only fill a tile have the code 0.
//
// Scales and offsets are IEEE halves in units of 2^-12, so that the smallest ones keep their precision:
//
//   scales, offsets [ceil(n / 16)][num_groups][16 rows] f16
#pragma once
#include "fp8.cuh"
#include "tensor_cores.cuh"

namespace quantised {

constexpr int TILE_ROWS = 16;
// Columns that share no more than one group: two steps of a product.
constexpr int HALF_COLUMNS = 32;

enum class CodeKind { INT4, INT8, FP8, E2M1 };

template <CodeKind kind>
constexpr int TILE_COLUMNS = kind == CodeKind::INT4 || kind == CodeKind::E2M1 ? 64 : 32;

struct Shape {
    int n, k, group_size;

    __device__ __forceinline__ int num_row_tiles() const { return (n + TILE_ROWS - 1) / TILE_ROWS; }
    template <CodeKind kind>
    __device__ __forceinline__ int num_column_tiles() const {
        return (k + TILE_COLUMNS<kind> - 1) / TILE_COLUMNS<kind>;
    }
    __device__ __forceinline__ int num_groups() const { return (k + group_size - 1) / group_size; }
};

// The first operand of one step, exact: codes of the lane's rows, in columns c to c + 3.
template <CodeKind kind>
__device__ __forceinline__ void unpack(u32 (&a)[4], const uint4& words, int half, int step);

// A code is the low bits of 128, where the last place of bf16 is 1; then 128 + 8 is subtracted.
template <>
__device__ __forceinline__ void unpack<CodeKind::INT4>(u32 (&a)[4], const uint4& words, int half, int step) {
    const u32 word = half == 0 ? (step == 0 ? words.x : words.y) : (step == 0 ? words.z : words.w);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        constexpr u32 ONES = 0x3f803f80u, MINUS_136 = 0xc308c308u;
        a[i] = fma_bf16_pairs((word >> 4 * i & 0x000f000fu) | 0x43004300u, ONES, MINUS_136);
    }
}

template <class Code>
__device__ __forceinline__ void unpack_bytes(u32 (&a)[4], const uint4& words, int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 word = step == 0 ? (i < 2 ? words.x : words.y) : (i < 2 ? words.z : words.w);
        a[i] = widen_codes<Code>(word >> 8 * (i % 2));
    }
}

template <>
__device__ __forceinline__ void unpack<CodeKind::INT8>(u32 (&a)[4], const uint4& words, int, int step) {
    unpack_bytes<i8>(a, words, step);
}

template <>
__device__ __forceinline__ void unpack<CodeKind::FP8>(u32 (&a)[4], const uint4& words, int, int step) {
    unpack_bytes<e4m3>(a, words, step);
}

// Sign, exponent and fraction go where bf16 has its sign, the last two bits of its exponent and the first one of its
// fraction, which is less than twice the number by a factor of 2^127, subnormal numbers included. -0 becomes 0.
template <>
__device__ __forceinline__ void unpack<CodeKind::E2M1>(u32 (&a)[4], const uint4& words, int half, int step) {
    const u32 word = half == 0 ? (step == 0 ? words.x : words.y) : (step == 0 ? words.z : words.w);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        constexpr u32 SCALE = 0x7f007f00u;
        const u32 magnitudes = i < 2 ? word << (6 - 4 * i) : word >> (4 * i - 6);
        a[i] = fma_bf16_pairs((word << (12 - 4 * i) & 0x80008000u) | (magnitudes & 0x01c001c0u), SCALE, 0);
    }
}

// A scale or an offset. The exponent of f16 is moved to that of f32, subnormal numbers included, and the unit is
// applied.
__device__ __forceinline__ float from_half(u16 half) {
    // 2^112, the difference of the exponents' biases, times 2^-12.
    const float magnitude = __uint_as_float(static_cast<u32>(half & 0x7fff) << 13) * 0x1p100f;
    return half & 0x8000 ? -magnitude : magnitude;
}

}  // namespace quantised
