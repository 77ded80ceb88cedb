// What kernels/tensor_cores.cuh does on the CPU.
#pragma once

// The place of a function's caller, as a default argument.
#define CUDA_CPU_CALLER (cuda_cpu::Place{__builtin_FILE(), __builtin_LINE()})

namespace cuda_cpu {

inline void copy_16(AsyncCopy copy) {
    if (copy.from == nullptr) {
        *static_cast<uint4*>(copy.to) = uint4{0, 0, 0, 0};
    } else {
        *static_cast<uint4*>(copy.to) = *static_cast<const uint4*>(copy.from);
    }
}

// A GPU copies at any time between the call and the wait: here it is the one or the other by chance.
inline void begin_copy(AsyncCopy copy, Place place) {
    if ((reinterpret_cast<uintptr_t>(copy.to) | reinterpret_cast<uintptr_t>(copy.from)) % 16 != 0) {
        fail(place, "an asynchronous copy between addresses that are no multiples of 16");
    }
    Thread& self = current_thread();
    if (self.random.coin()) {
        copy_16(copy);
    } else {
        self.copies.push_back(copy);
    }
}

template <class OfLane>
u16 element_of_row(OfLane row_of_lane, unsigned row, unsigned column) {
    return static_cast<const u16*>(row_of_lane(row))[column];
}

inline void ldmatrix(u32 (&r)[4], const void* row, bool is_transposed, Place place) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
        fail(place, "ldmatrix of a row that is not at a multiple of 16 bytes");
    }
    const unsigned lane = current_thread().lane;
    exchange(row, place, [&](auto row_of_lane) {
        for (unsigned matrix = 0; matrix < 4; ++matrix) {
            const unsigned i = lane / 4, j = 2 * (lane % 4);
            u32 elements[2];
            for (unsigned k = 0; k < 2; ++k) {
                elements[k] = is_transposed ? element_of_row(row_of_lane, 8 * matrix + j + k, i)
                                            : element_of_row(row_of_lane, 8 * matrix + i, j + k);
            }
            r[matrix] = elements[0] | elements[1] << 16;
        }
        return 0;
    });
}

// g++ adds and multiplies both at once.
using TwoDoubles __attribute__((vector_size(16))) = double;

inline float half_of(u32 pair, unsigned half) {
    return __uint_as_float(half == 0 ? pair << 16 : pair & 0xffff0000u);
}

}  // namespace cuda_cpu

// Products are exact, and their sum is rounded once. Tensor cores round differently, and differ among themselves.
inline void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], cuda_cpu::Place place = CUDA_CPU_CALLER) {
    struct Operands {
        u32 a[4], b[2];
    };
    const Operands own{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    const unsigned lane = cuda_cpu::current_thread().lane, g = lane / 4, t = lane % 4;
    cuda_cpu::exchange(own, place, [&](auto of_lane) {
        // Rows g and g + 8 of our two columns.
        cuda_cpu::TwoDoubles sums[2] = {{d[0], d[1]}, {d[2], d[3]}};
        for (unsigned pair = 0; pair < 4; ++pair) {
            // The lanes that hold columns 2 * pair and so on of row g of `a`, and these rows of our two columns of `b`.
            const Operands row = of_lane(4 * g + pair);
            const Operands columns[2] = {of_lane(4 * (2 * t) + pair), of_lane(4 * (2 * t + 1) + pair)};
            for (unsigned upper = 0; upper < 2; ++upper) {
                for (unsigned half = 0; half < 2; ++half) {
                    const cuda_cpu::TwoDoubles y = {cuda_cpu::half_of(columns[0].b[upper], half),
                                                    cuda_cpu::half_of(columns[1].b[upper], half)};
                    for (unsigned i = 0; i < 2; ++i) {
                        sums[i] += static_cast<double>(cuda_cpu::half_of(row.a[2 * upper + i], half)) * y;
                    }
                }
            }
        }
        for (unsigned i = 0; i < 4; ++i) d[i] = static_cast<float>(sums[i / 2][i % 2]);
        return 0;
    });
}

using SharedAddress = unsigned char*;

inline SharedAddress shared_address(const void* at) { return static_cast<unsigned char*>(const_cast<void*>(at)); }

template <class T>
T kept(T x) {
    return x;
}

inline void ldmatrix_x4(u32 (&r)[4], SharedAddress row, cuda_cpu::Place place = CUDA_CPU_CALLER) {
    cuda_cpu::ldmatrix(r, row, false, place);
}

inline void ldmatrix_x4_transposed(u32 (&r)[4], SharedAddress row, cuda_cpu::Place place = CUDA_CPU_CALLER) {
    cuda_cpu::ldmatrix(r, row, true, place);
}

inline void cp_async_16(SharedAddress to, const void* from, cuda_cpu::Place place = CUDA_CPU_CALLER) {
    cuda_cpu::begin_copy({to, from}, place);
}

inline void cp_async_16_or_zeros(SharedAddress to, const void* from, bool is_read, cuda_cpu::Place place = CUDA_CPU_CALLER) {
    cuda_cpu::begin_copy({to, is_read ? from : nullptr}, place);
}

inline void cp_async_commit() {
    cuda_cpu::Thread& self = cuda_cpu::current_thread();
    self.groups.push_back(std::move(self.copies));
    self.copies.clear();
}

template <int num_pending>
inline void cp_async_wait() {
    auto& groups = cuda_cpu::current_thread().groups;
    while (groups.size() > static_cast<size_t>(num_pending)) {
        for (const cuda_cpu::AsyncCopy& copy : groups.front()) cuda_cpu::copy_16(copy);
        groups.erase(groups.begin());
    }
}
