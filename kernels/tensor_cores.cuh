// Tensor cores, and copies from global to shared memory that run in the background: PTX for GPUs from sm_80 on. On the
// CPU tensor_cores_cpu.h does the same, with the layouts of the PTX ISA (9.7.14, "Warp Level Matrix Multiply-Accumulate
// Instructions").
//
// Lane `l` of a warp, with g = l / 4 and t = l % 4, holds of the matrices of mma_bf16:
//
//   a (16 x 16)     a[0]: row g, columns 2t, 2t+1      a[1]: row g + 8, the same columns
//                   a[2]: row g, columns 2t+8, 2t+9    a[3]: row g + 8, the same columns
//   b (16 x 8)      b[0]: rows 2t, 2t+1 of column g    b[1]: rows 2t+8, 2t+9 of column g
//   d (16 x 8)      d[0], d[1]: row g, columns 2t, 2t+1    d[2], d[3]: row g + 8, the same columns
//
// where the element with the smaller index is the lower half of a register. All lanes of the warp call these functions,
// except those named cp_async.
#pragma once
#include "common.cuh"

#ifdef __CUDACC__

// d += a * b: bf16 with sums in f32.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// An address in shared memory.
using SharedAddress = u32;

__device__ __forceinline__ SharedAddress shared_address(const void* at) {
    return static_cast<u32>(__cvta_generic_to_shared(at));
}

// Keeps x in a register, whatever it was computed from, so that constants which are added to it become offsets in
// instructions.
__device__ __forceinline__ u32 kept(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ const unsigned char* kept(const unsigned char* x) {
    asm volatile("" : "+l"(x));
    return x;
}

// Four matrices of 8 x 8 elements of 16 bits from shared memory. Lane 8i + j names row j of matrix i, 16 bytes at a
// multiple of 16 bytes; lane l receives the elements 2(l % 4) and 2(l % 4) + 1 of row l / 4 of matrix i in r[i].
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// The same, transposed: lane l receives the elements of rows 2(l % 4) and 2(l % 4) + 1 in column l / 4 of matrix i.
__device__ __forceinline__ void ldmatrix_x4_transposed(u32 (&r)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// Copies 16 bytes to shared memory, some time before the wait for its group. Both addresses are multiples of 16 bytes.
__device__ __forceinline__ void cp_async_16(SharedAddress to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The same if `is_read`; else it writes zeros, and does not read `from`.
__device__ __forceinline__ void cp_async_16_or_zeros(SharedAddress to, const void* from, bool is_read) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_read ? 16 : 0)
                 : "memory");
}

// Makes a group of the copies of this thread since the last group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the `num_pending` latest groups of this thread are not complete. Other threads see the copies
// after a barrier.
template <int num_pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(num_pending) : "memory");
}

#else
#include "tensor_cores_cpu.h"
#endif
