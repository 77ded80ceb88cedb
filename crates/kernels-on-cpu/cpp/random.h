// Random numbers for schedules (SplitMix64; Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
// OOPSLA 2014).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <utility>

namespace cuda_cpu {

class Random {
public:
    explicit Random(uint64_t seed) : state(seed) {}

    uint64_t next() {
        uint64_t x = state += 0x9e3779b97f4a7c15u;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        return x ^ x >> 31;
    }

    // A number below `count`. The bias of the product is far below what a test could see.
    size_t below(size_t count) { return static_cast<size_t>(static_cast<unsigned __int128>(next()) * count >> 64); }

    bool coin() { return next() >> 63; }

    // Shuffles `items`.
    template <class Items>
    void shuffle(Items& items) {
        for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[below(i)]);
    }

private:
    uint64_t state;
};

}  // namespace cuda_cpu
