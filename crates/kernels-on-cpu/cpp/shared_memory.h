// The shared memory of a block.
//
//   | dynamic | gap | array of place A | gap | array of place B | gap | ... free
//
// Arrays get their addresses when the first thread of the block reaches their place in the code. All of it is NaN
// (bytes of 0xff) when a block begins. Gaps and free memory are forbidden to the kernel, which the address sanitizer
// sees.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <memory>

namespace cuda_cpu {

class SharedMemory {
public:
    SharedMemory();
    ~SharedMemory();
    SharedMemory(const SharedMemory&) = delete;

    // Begins a block: forgets its arrays, and fills with NaN what the last one may have written.
    void begin_block(size_t dynamic_bytes);

    void* dynamic() { return memory; }

    // The array of a place in the code.
    void* array(const void* place, size_t num_bytes);

private:
    struct Array {
        const void* place;
        uint8_t* start;
        size_t num_bytes;
    };
    static constexpr int MAX_ARRAYS = 32;

    uint8_t* take(size_t num_bytes);

    uint8_t* memory;
    size_t num_used = 0;
    size_t num_static_bytes = 0;
    Array arrays[MAX_ARRAYS];
    int num_arrays = 0;
    bool is_locked = false;
};

// The most that a block may have: on sm_80 163 KiB, on sm_90 227 KiB; of static arrays 48 KiB.
constexpr size_t MAX_SHARED_BYTES = 227 << 10;
constexpr size_t MAX_STATIC_SHARED_BYTES = 48 << 10;

}  // namespace cuda_cpu
