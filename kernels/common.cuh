// What all kernels share: types, bf16, accesses of 16 bytes, sums over a warp or a block.
//
// Two compilers read the kernels: NVRTC 12.4, without any header of the host, for GPUs from sm_80 on, and g++ with
// cuda_cpu.h (crates/kernels-on-cpu), which runs them on the CPU for tests. So a kernel is C++17 with these rules:
//
//   KERNEL(name, max_threads)(...) {...}    defines an exported kernel; EXPORT_KERNEL(name) below it names it to the tests
//   SHARED_ARRAY(type, name, len);          instead of __shared__ type name[len]
//   DYNAMIC_SHARED(type, name);             instead of extern __shared__; at most one of them in a kernel
//   inline PTX                              only in this header, in fp8.cuh and in tensor_cores.cuh
//
// What a row becomes depends on that row alone: every sum has an order that only the row's width and the block's size
// decide, and there are no atomics on floats. Blocks are launched with a multiple of 32 threads.
#pragma once

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// A bfloat16. NVIDIA's own header would need two more packages to compile.
struct bf16 {
    u16 bits;
};

#ifdef __CUDACC__

#define KERNEL(name, ...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name
#define EXPORT_KERNEL(name)
#define SHARED_ARRAY(type, name, len) __shared__ __align__(16) type name[len]
#define DYNAMIC_SHARED(type, name)                                  \
    extern __shared__ __align__(16) unsigned char dynamic_shared[]; \
    type* const name = reinterpret_cast<type*>(dynamic_shared)

// The nearest bf16, ties to even; NaN stays NaN.
__device__ __forceinline__ bf16 to_bf16(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// Two of them in a register, `low` in the lower half.
__device__ __forceinline__ u32 to_bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// a * b + c of both halves, rounded once.
__device__ __forceinline__ u32 fma_bf16_pairs(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// 2^x, to 2 units in the last place; exactly 1 at 0, and 0 at -inf. Subnormal numbers are zero.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#else
#include "cuda_cpu.h"

inline bf16 to_bf16(float x) {
    const u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
    return {static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline u32 to_bf16_pair(float low, float high) {
    return to_bf16(low).bits | static_cast<u32>(to_bf16(high).bits) << 16;
}

inline float exp2_approx(float x) { return exp2f(x); }
#endif

constexpr int WARP_SIZE = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

// Marks a token that the step before has sampled: the rest is the row that it was sampled from.
constexpr u32 IN_FLIGHT = 0x80000000u;

// A slot of a token whose key and value are not stored, a block that is not read.
constexpr u32 NOWHERE = 0xffffffffu;

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// The token that a word of a step's tokens stands for. One that was sampled in the step before may be a code of
// sample.cu instead, which is token 0 here: the host throws away what becomes of it.
__device__ __forceinline__ u32 token_of(u32 word, const u32* sampled) {
    if (word < IN_FLIGHT) return word;
    const u32 token = sampled[word - IN_FLIGHT];
    return token < IN_FLIGHT ? token : 0;
}

// -------------------------------------------------------------------------------------------------- bf16

__device__ __forceinline__ float to_float(bf16 x) {
    return __uint_as_float(static_cast<u32>(x.bits) << 16);
}

__device__ __forceinline__ float low_float(u32 pair) { return __uint_as_float(pair << 16); }

__device__ __forceinline__ float high_float(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

#ifndef __CUDACC__
inline u32 fma_bf16_pairs(u32 a, u32 b, u32 c) {
    // Products of bf16 are exact in f64.
    const auto fma = [](float a, float b, float c) { return static_cast<float>(static_cast<double>(a) * b + c); };
    return to_bf16_pair(fma(low_float(a), low_float(b), low_float(c)), fma(high_float(a), high_float(b), high_float(c)));
}
#endif

// The codes in the lower bytes of both halves as bf16, which represents them exactly; the upper bytes do not matter.
template <class Code>
__device__ __forceinline__ u32 widen_codes(u32 codes);

// Signed bytes: 128 plus the low 7 bits, minus 128 or, with the sign bit, which is the last bit of the exponent of
// bf16, 256.
template <>
__device__ __forceinline__ u32 widen_codes<i8>(u32 codes) {
    constexpr u32 MINUS_ONES = 0xbf80bf80u;
    return fma_bf16_pairs((codes & 0x00800080u) | 0x43004300u, MINUS_ONES, (codes & 0x007f007fu) | 0x43004300u);
}

// -------------------------------------------------------------------------------- accesses of 16 bytes

// Elements of the vectorised paths: 8 are 16 bytes of bf16 and 32 bytes of f32. Addresses are multiples of 16 bytes.
constexpr int VECTOR = 8;

__device__ __forceinline__ void load_8(float (&x)[8], const float* from) {
    const float4 low = reinterpret_cast<const float4*>(from)[0];
    const float4 high = reinterpret_cast<const float4*>(from)[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

__device__ __forceinline__ void load_8(float (&x)[8], const bf16* from) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    x[0] = low_float(words.x), x[1] = high_float(words.x);
    x[2] = low_float(words.y), x[3] = high_float(words.y);
    x[4] = low_float(words.z), x[5] = high_float(words.z);
    x[6] = low_float(words.w), x[7] = high_float(words.w);
}

__device__ __forceinline__ void store_8(float* to, const float (&x)[8]) {
    reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

__device__ __forceinline__ void store_8(bf16* to, const float (&x)[8]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(to_bf16_pair(x[0], x[1]), to_bf16_pair(x[2], x[3]),
                                               to_bf16_pair(x[4], x[5]), to_bf16_pair(x[6], x[7]));
}

// 8 elements of a row of `len`, from `first` on; zeros beyond its end, or without a row. `first` is a multiple of 8,
// and rows are at multiples of 16 bytes if `len` is one of 8.
__device__ __forceinline__ uint4 load_8_or_zeros(const bf16* row, bool has_row, int first, int len) {
    if (!has_row || first >= len) return make_uint4(0, 0, 0, 0);
    if (len % VECTOR == 0) return *reinterpret_cast<const uint4*>(row + first);
    u32 words[4] = {};
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        if (first + i < len) words[i / 2] |= static_cast<u32>(row[first + i].bits) << 16 * (i % 2);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// ------------------------------------------------------------------------------------------- reductions

// The sum over groups of `num_lanes` consecutive lanes, a power of two, in each of their lanes. All lanes of the warp
// call it.
__device__ __forceinline__ float group_sum(float x, int num_lanes) {
    for (int distance = num_lanes / 2; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(ALL_LANES, x, distance);
    }
    return x;
}

__device__ __forceinline__ float group_max(float x, int num_lanes) {
    for (int distance = num_lanes / 2; distance > 0; distance /= 2) {
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, distance));
    }
    return x;
}

__device__ __forceinline__ float warp_sum(float x) { return group_sum(x, WARP_SIZE); }

__device__ __forceinline__ float warp_max(float x) { return group_max(x, WARP_SIZE); }

// The sum over a block of one dimension, in each of its threads. `scratch` is shared memory of WARP_SIZE floats, which
// may be used again after the next __syncthreads().
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int num_warps = blockDim.x / WARP_SIZE;
    x = warp_sum(x);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    // Every warp adds up all of them: one barrier less than if the first one did it for the others.
    return warp_sum(lane < num_warps ? scratch[lane] : 0.0f);
}

// The largest of a block, which is not negative. As block_sum, but for that.
__device__ __forceinline__ float block_max(float x, float* scratch) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int num_warps = blockDim.x / WARP_SIZE;
    x = warp_max(x);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_max(lane < num_warps ? scratch[lane] : 0.0f);
}
