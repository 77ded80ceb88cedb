// Numbers of 8 bits: a sign, 4 bits of exponent and 3 of mantissa, "E4M3" (Micikevicius et al., arXiv:2209.05433). They
// reach 448, and are 2^-9 apart below 2^-6. There are no infinities; 0x7f and 0xff are NaN.
//
//   to_e4m3_pair    from f32: nearest, ties to even; beyond 448 it is 448; NaN is 0x7f. GPUs have an instruction from sm_89
//                   on, and the others compute the same
//   widen_codes     to bf16, exactly, on all GPUs alike. The instruction of sm_89 converts to f16 only, which would take
//                   another two conversions
#pragma once
#include "common.cuh"

struct e4m3 {
    u8 bits;
};

constexpr float MAX_E4M3 = 448.0f;

// In the lower bits.
__device__ __forceinline__ u32 to_e4m3_by_integers(float x) {
    const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80u;
    u32 magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fu;
    magnitude = min(magnitude, __float_as_uint(MAX_E4M3));
    // Below 2^-6 a code counts steps of 2^-9, which is the last place of 2^14. Else the lower 20 bits of the mantissa
    // are rounded away, and the exponent's bias of 127 becomes 7.
    const u32 is_small = magnitude < 0x3c800000u;
    const u32 steps = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 16384.0f)) - __float_as_uint(16384.0f);
    const u32 rounded = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
    return sign | (is_small ? steps : rounded - (120u << 3));
}

// Two of them in the lower half of a register, `low` in the lowest byte.
__device__ __forceinline__ u32 to_e4m3_pair(float low, float high) {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 890
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return to_e4m3_by_integers(low) | to_e4m3_by_integers(high) << 8;
#endif
}

// Neither code is NaN. Exponent and mantissa take the places of those of bf16, as a number that is too small by 2^120:
// the difference of the biases. Products with it are exact, also of subnormal numbers, which fma.bf16x2 has.
template <>
__device__ __forceinline__ u32 widen_codes<e4m3>(u32 codes) {
    constexpr u32 SCALE = 0x7b807b80u, MINUS_ZERO = 0x80008000u;
    return fma_bf16_pairs((codes & 0x00800080u) << 8 | (codes & 0x007f007fu) << 4, SCALE, MINUS_ZERO);
}
