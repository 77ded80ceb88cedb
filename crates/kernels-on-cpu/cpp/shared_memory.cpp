#include "shared_memory.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "machine.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, num_bytes) ((void)(address), (void)(num_bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, num_bytes) ((void)(address), (void)(num_bytes))
#endif

namespace cuda_cpu {

namespace {

constexpr size_t ALIGNMENT = 128;
constexpr size_t GAP = 128;
constexpr size_t CAPACITY = MAX_SHARED_BYTES + MAX_STATIC_SHARED_BYTES + (64 << 10);

}  // namespace

SharedMemory::SharedMemory() : memory(static_cast<uint8_t*>(aligned_alloc(ALIGNMENT, CAPACITY))) {
    memset(memory, 0xff, CAPACITY);
    ASAN_POISON_MEMORY_REGION(memory, CAPACITY);
}

SharedMemory::~SharedMemory() {
    ASAN_UNPOISON_MEMORY_REGION(memory, CAPACITY);
    free(memory);
}

void SharedMemory::begin_block(size_t dynamic_bytes) {
    ASAN_UNPOISON_MEMORY_REGION(memory, num_used);
    memset(memory, 0xff, num_used);
    ASAN_POISON_MEMORY_REGION(memory, num_used);
    num_used = 0;
    num_static_bytes = 0;
    num_arrays = 0;
    take(dynamic_bytes);
}

void* SharedMemory::array(const void* place, size_t num_bytes) {
    // A lock that orders nothing in the eyes of the thread sanitizer: a real one would hide races of the kernel.
    while (__atomic_exchange_n(&is_locked, true, __ATOMIC_RELAXED)) sched_yield();
    Array* found = nullptr;
    for (int i = 0; i < num_arrays; ++i) {
        if (arrays[i].place == place) found = &arrays[i];
    }
    if (found == nullptr) {
        num_static_bytes += num_bytes;
        if (num_static_bytes > MAX_STATIC_SHARED_BYTES) {
            fail({__FILE__, __LINE__}, "a block's arrays are more than 48 KiB of static shared memory");
        }
        if (num_arrays == MAX_ARRAYS) fail({__FILE__, __LINE__}, "too many shared arrays");
        found = &arrays[num_arrays++];
        *found = {place, take(num_bytes), num_bytes};
    }
    void* const start = found->start;
    __atomic_store_n(&is_locked, false, __ATOMIC_RELAXED);
    return start;
}

uint8_t* SharedMemory::take(size_t num_bytes) {
    uint8_t* const start = memory + num_used;
    ASAN_UNPOISON_MEMORY_REGION(start, num_bytes);
    num_used += (num_bytes + GAP + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return start;
}

}  // namespace cuda_cpu
