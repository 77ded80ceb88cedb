// CUDA C++ on a CPU, for tests: what a kernel finds there instead of the CUDA compiler's own words.
//
//   cuda_cpu.h            keywords, vector types, built-in variables, intrinsics
//   tensor_cores_cpu.h    tensor cores and asynchronous copies (kernels/tensor_cores.cuh)
//   machine.h             a block of threads, as the intrinsics see it
//   shared_memory.h       its shared memory
//   fibers.cpp            runs each CUDA thread as a fiber, in a random order that a seed decides
//   threads.cpp           with -DCUDA_CPU_THREADS: as a thread of its own, for the thread sanitizer
//   registry.h launch.h   kernels by name, and the C function that launches them
//
// What it finds and a GPU would not tell: barriers and shuffles that not all threads reach, with file and line; reads
// of shared memory that nobody wrote (it is full of NaN); missing waits for asynchronous copies (a copy happens at once
// or at the wait, by chance). With random schedules a missing barrier shows as a wrong result, under the thread
// sanitizer as a race; the address sanitizer finds accesses beyond a buffer or a shared array.
//
// What it cannot show: speed, bank conflicts, the rounding of approximate instructions, the order in which a tensor
// core adds up, and the memory order between the lanes of a warp, except under the thread sanitizer, where a shuffle is
// no barrier.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

#include "machine.h"
#include "registry.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__ __restrict
#define __align__(n) alignas(n)

#define CUDA_CPU_FIRST(first, ...) first
#define KERNEL(name, ...)                                                          \
    constexpr unsigned name##_max_threads = CUDA_CPU_FIRST(__VA_ARGS__, 0);        \
    extern "C" void name
#define EXPORT_KERNEL(name) \
    static const bool name##_is_registered = cuda_cpu::add_kernel(#name, &name, name##_max_threads);

// Each place in the code has its own array, and each instance of a template has its own place, as in CUDA.
#define SHARED_ARRAY(type, name, len)                                   \
    type* const name = static_cast<type*>(cuda_cpu::shared_array(       \
        [] { static const char place = 0; return &place; }(), (len) * sizeof(type)))
#define DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(cuda_cpu::dynamic_shared())

#define CUDA_CPU_PLACE (cuda_cpu::Place{__FILE__, __LINE__})

// ------------------------------------------------------------------------------------------- built-in variables

#define threadIdx (cuda_cpu::current_thread().index)
#define blockIdx (cuda_cpu::current_block().index)
#define blockDim (cuda_cpu::current_block().dims)
#define gridDim (cuda_cpu::current_block().grid)

// ------------------------------------------------------------------------------------------------ vector types

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) int2 {
    int32_t x, y;
};
struct alignas(16) int4 {
    int32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline int2 make_int2(int32_t x, int32_t y) { return {x, y}; }
inline int4 make_int4(int32_t x, int32_t y, int32_t z, int32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// -------------------------------------------------------------------------------------------------- arithmetic

using std::max;
using std::min;

inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float __uint_as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
inline int32_t __float_as_int(float x) { return static_cast<int32_t>(__float_as_uint(x)); }
inline float __int_as_float(int32_t bits) { return __uint_as_float(static_cast<uint32_t>(bits)); }

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
// Saturates, and makes 0 of NaN, as the instruction does.
inline int __float2int_rn(float x) {
    const float rounded = nearbyintf(x);
    if (rounded != rounded) return 0;
    if (rounded >= 2147483648.0f) return 0x7fffffff;
    return rounded <= -2147483648.0f ? -0x7fffffff - 1 : static_cast<int>(rounded);
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<uint32_t>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
// Four of the eight bytes of x and y. (CUDA's sign selectors are not here.)
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selectors) {
    const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    uint32_t chosen = 0;
    for (unsigned i = 0; i < 4; ++i) {
        chosen |= static_cast<uint32_t>(bytes >> 8 * (selectors >> 4 * i & 7) & 0xff) << 8 * i;
    }
    return chosen;
}
inline uint32_t __umulhi(uint32_t x, uint32_t y) {
    return static_cast<uint32_t>(static_cast<uint64_t>(x) * y >> 32);
}

// On integers only: sums of floats would depend on the order.
template <class T>
inline T atomicAdd(T* address, T x) {
    static_assert(std::is_integral_v<T>);
    return __atomic_fetch_add(address, x, __ATOMIC_RELAXED);
}
template <class T>
inline T atomicOr(T* address, T x) {
    static_assert(std::is_integral_v<T>);
    return __atomic_fetch_or(address, x, __ATOMIC_RELAXED);
}
template <class T>
inline T atomicExch(T* address, T x) {
    static_assert(std::is_integral_v<T>);
    return __atomic_exchange_n(address, x, __ATOMIC_RELAXED);
}

// ---------------------------------------------------------------------------------------- barriers and shuffles

#define __syncthreads() cuda_cpu::wait_for_block(CUDA_CPU_PLACE)
#define __syncwarp(...) cuda_cpu::wait_for_warp(CUDA_CPU_PLACE)
#define __shfl_sync(lanes, x, lane) cuda_cpu::shuffle(lanes, x, (lane) & 31, CUDA_CPU_PLACE)
#define __shfl_xor_sync(lanes, x, mask) \
    cuda_cpu::shuffle(lanes, x, (cuda_cpu::current_thread().lane ^ (mask)) & 31, CUDA_CPU_PLACE)
#define __shfl_down_sync(lanes, x, distance) cuda_cpu::shuffle_down(lanes, x, distance, CUDA_CPU_PLACE)
#define __shfl_up_sync(lanes, x, distance) cuda_cpu::shuffle_up(lanes, x, distance, CUDA_CPU_PLACE)
#define __ballot_sync(lanes, condition) cuda_cpu::ballot(lanes, condition, CUDA_CPU_PLACE)
#define __any_sync(lanes, condition) (cuda_cpu::ballot(lanes, condition, CUDA_CPU_PLACE) != 0)
#define __all_sync(lanes, condition) (cuda_cpu::ballot(lanes, !(condition), CUDA_CPU_PLACE) == 0)
#define __reduce_add_sync(lanes, x) cuda_cpu::reduce_add(lanes, x, CUDA_CPU_PLACE)

namespace cuda_cpu {

template <class T>
T shuffle(uint32_t lanes, T x, unsigned lane, Place place) {
    check_lanes(lanes, place);
    return exchange(x, place, [&](auto of_lane) { return of_lane(lane); });
}

template <class T>
T shuffle_down(uint32_t lanes, T x, unsigned distance, Place place) {
    const unsigned lane = current_thread().lane;
    return shuffle(lanes, x, lane + distance < 32 ? lane + distance : lane, place);
}

template <class T>
T shuffle_up(uint32_t lanes, T x, unsigned distance, Place place) {
    const unsigned lane = current_thread().lane;
    return shuffle(lanes, x, lane >= distance ? lane - distance : lane, place);
}

inline uint32_t ballot(uint32_t lanes, bool condition, Place place) {
    check_lanes(lanes, place);
    return exchange(condition, place, [](auto of_lane) {
        uint32_t votes = 0;
        for (unsigned lane = 0; lane < 32; ++lane) votes |= static_cast<uint32_t>(of_lane(lane)) << lane;
        return votes;
    });
}

inline uint32_t reduce_add(uint32_t lanes, uint32_t x, Place place) {
    check_lanes(lanes, place);
    return exchange(x, place, [](auto of_lane) {
        uint32_t sum = 0;
        for (unsigned lane = 0; lane < 32; ++lane) sum += of_lane(lane);
        return sum;
    });
}

}  // namespace cuda_cpu
