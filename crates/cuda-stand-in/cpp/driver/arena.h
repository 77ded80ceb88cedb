// A range of addresses with poisoned allocations, each between pages that nobody may touch.
//
// Device memory has two ranges of the same size, at a fixed distance. Programs get addresses of the outer range, which
// is never accessible: a host that follows a device pointer faults at once, on any thread, whatever else runs. The
// stand-in and the emulated kernels use the inner range: launches translate the pointers among their arguments.
//
//   outer   |  no access  ...............................................................|
//   inner   |no access| poison  0x1000 bytes poison |no access|   freed: no access       |
//                      slack   the allocation  slack  guard
//
// An allocation ends, rounded up to the alignment, where its last page ends, so that the guard catches whoever goes
// further. What is left of its pages is slack, whose poison is compared when the allocation is freed.
#pragma once
#include <deque>
#include <map>
#include <string>

#include "../api.h"

namespace stand_in {

struct Allocation {
    uintptr_t begin = 0;  // outer address
    size_t size = 0;      // in bytes, as asked for
    uintptr_t first_page = 0;
    size_t num_page_bytes = 0;
    uint64_t number = 0;  // of the allocations of this arena, from 1
    bool is_freed = false;
    bool is_ready = true;  // false: allocated in stream order, and the stream has not come to it

    std::string name() const;
};

class Arena {
public:
    enum class Kind { Device, Host };

    using Allocations = std::map<uintptr_t, Allocation>;  // by first_page

    static constexpr size_t ALIGNMENT = 256;

    // Reserves num_bytes of addresses, which cost no memory.
    Arena(Kind kind, const char* name, size_t num_bytes);
    Arena(const Arena&) = delete;

    // Null if the addresses are used up.
    Allocation* allocate(size_t size);

    // False if begin is not the beginning of a live allocation. Ends the process if its surroundings were written to.
    bool free(uintptr_t begin);

    // Also of freed allocations, as long as they are remembered; null if there is none.
    const Allocation* find(uintptr_t address) const;
    Allocation* find_live(uintptr_t begin);

    bool contains(uintptr_t address) const { return address >= outer_ && address - outer_ < num_bytes_; }
    bool contains_inner(uintptr_t address) const { return address >= inner_ && address - inner_ < num_bytes_; }
    uintptr_t inner(uintptr_t address) const { return address - outer_ + inner_; }
    uintptr_t outer(uintptr_t address) const { return address - inner_ + outer_; }

    // What is at an outer address, for messages.
    std::string describe(uintptr_t address) const;

    const Allocations& allocations() const { return allocations_; }
    const char* name() const { return name_; }

private:
    uintptr_t place(size_t num_page_bytes);
    Allocations::const_iterator first_around(uintptr_t address) const;
    void forget(uintptr_t first_page);
    void check_slack(const Allocation& allocation) const;

    const char* name_;
    size_t num_bytes_;
    uintptr_t outer_;
    uintptr_t inner_;
    uintptr_t next_;  // addresses are used in turn, so that freed ones stay recognisable for long
    uint64_t num_allocations_ = 0;
    Allocations allocations_;
    std::deque<uintptr_t> freed_;  // first pages, the oldest first
};

// NaN in bf16, f16 and f32, and, as an index, far outside of everything.
inline constexpr uint16_t POISON = 0xffa5;

}  // namespace stand_in
