// A block of CUDA threads, as the intrinsics of a kernel see it. fibers.cpp and threads.cpp run it.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <functional>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "random.h"
#include "shared_memory.h"

namespace cuda_cpu {

// Where a thread calls an intrinsic.
struct Place {
    const char* file;
    int line;
};

struct Dims {
    unsigned x = 1, y = 1, z = 1;

    size_t count() const { return static_cast<size_t>(x) * y * z; }
};

// The parts of a launch.
struct Launch {
    Dims grid, block;
    size_t shared_bytes = 0;
    // Decides the order of blocks and threads, and when asynchronous copies happen.
    uint64_t seed = 0;
};

// An error of a kernel or a launch.
struct LaunchError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Calls `body` once for each thread of the grid.
void run(const Launch& launch, const std::function<void()>& body);

// A copy of 16 bytes to shared memory that has not happened yet; from nowhere: zeros.
struct AsyncCopy {
    void* to;
    const void* from;
};

struct Thread {
    Dims index;
    unsigned lane, warp;
    Random random{0};
    // Exchanges with other lanes that it took part in.
    unsigned num_exchanges = 0;
    // Copies that are in no group yet, and groups that are not complete.
    std::vector<AsyncCopy> copies;
    std::vector<std::vector<AsyncCopy>> groups;
};

// Values that the lanes of a warp exchange. Two sets of slots take turns: when a lane writes to a set again, all lanes
// have passed the exchange after the one that they read this set in.
constexpr size_t MAX_EXCHANGED_WORDS = 4;
struct Warp {
    uint64_t slots[2][32][MAX_EXCHANGED_WORDS];
};

struct Block {
    Dims grid, dims, index;
    std::vector<Warp> warps;
    SharedMemory shared;
};

// Every intrinsic reads these: without a call of the dynamic linker, also in a library that is opened later.
#define CUDA_CPU_STATIC_TLS __attribute__((tls_model("initial-exec")))
extern thread_local constinit Thread* running_thread CUDA_CPU_STATIC_TLS;
extern thread_local constinit Block* running_block CUDA_CPU_STATIC_TLS;

inline Thread& current_thread() { return *running_thread; }
inline Block& current_block() { return *running_block; }

inline void* shared_array(const void* place, size_t num_bytes) {
    return current_block().shared.array(place, num_bytes);
}
inline void* dynamic_shared() { return current_block().shared.dynamic(); }

// Barriers. An exchange between lanes waits for all of them, but orders no accesses to memory.
void wait_for_block(Place place);
void wait_for_warp(Place place);
void wait_for_exchange(Place place);

// Ends the launch with an error.
[[noreturn]] void fail(Place place, const char* what);

inline void check_lanes(uint32_t lanes, Place place) {
    if (lanes != 0xffffffffu) fail(place, "an exchange between a part of the lanes of a warp");
}

// Words of slots. Relaxed atomics tie nothing together in the eyes of the thread sanitizer, and are no races either.
// Fibers need none, and a compiler leaves out what nobody reads.
#ifdef CUDA_CPU_THREADS
inline void store(uint64_t& slot, uint64_t word) { __atomic_store_n(&slot, word, __ATOMIC_RELAXED); }
inline uint64_t load(const uint64_t& slot) { return __atomic_load_n(&slot, __ATOMIC_RELAXED); }
#else
inline void store(uint64_t& slot, uint64_t word) { slot = word; }
inline uint64_t load(const uint64_t& slot) { return slot; }
#endif

// Shows `value` to all lanes of the warp, and returns `read(of_lane)`, where of_lane(i) is the value of lane i.
template <class T, class Read>
auto exchange(const T& value, Place place, Read read) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t) * MAX_EXCHANGED_WORDS);
    constexpr size_t num_words = (sizeof(T) + sizeof(uint64_t) - 1) / sizeof(uint64_t);
    Thread& self = current_thread();
    auto& slots = current_block().warps[self.warp].slots[self.num_exchanges++ % 2];
    uint64_t words[num_words] = {};
    memcpy(words, &value, sizeof value);
    for (size_t i = 0; i < num_words; ++i) store(slots[self.lane][i], words[i]);
    wait_for_exchange(place);
    return read([&](unsigned lane) {
        uint64_t words[num_words];
        for (size_t i = 0; i < num_words; ++i) words[i] = load(slots[lane][i]);
        T other;
        memcpy(&other, words, sizeof other);
        return other;
    });
}

}  // namespace cuda_cpu
