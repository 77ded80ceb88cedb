#include "arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "reports.h"

namespace stand_in {
namespace {

constexpr size_t PAGE = 4096;
constexpr size_t GUARD = PAGE;
constexpr size_t MAX_REMEMBERED = 10000;

size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

uintptr_t reserve(size_t num_bytes) {
    void* begin = mmap(nullptr, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) die("cannot reserve %zu bytes of addresses", num_bytes);
    return reinterpret_cast<uintptr_t>(begin);
}

// A file full of poison. Allocations map it copy-on-write, so that poison costs neither time nor memory where nothing
// is ever written.
class PoisonFile {
public:
    static constexpr size_t MAX_BYTES = size_t{16} << 20;

    int with_bytes(size_t num_bytes) {
        if (file_ < 0) file_ = memfd_create("cuda-stand-in poison", MFD_CLOEXEC);
        const std::vector<uint16_t> page(PAGE / sizeof(uint16_t), POISON);
        for (; num_bytes_ < num_bytes; num_bytes_ += PAGE) {
            if (pwrite(file_, page.data(), PAGE, static_cast<off_t>(num_bytes_)) != static_cast<ssize_t>(PAGE)) {
                die("cannot write poison");
            }
        }
        return file_;
    }

private:
    int file_ = -1;
    size_t num_bytes_ = 0;
};

void map_poison(uintptr_t begin, size_t num_bytes) {
    static PoisonFile poison;
    const int file = poison.with_bytes(std::min(num_bytes, PoisonFile::MAX_BYTES));
    for (size_t done = 0; done < num_bytes; done += PoisonFile::MAX_BYTES) {
        const size_t part = std::min(num_bytes - done, PoisonFile::MAX_BYTES);
        void* at = reinterpret_cast<void*>(begin + done);
        const int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
        if (mmap(at, part, PROT_READ | PROT_WRITE, flags, file, 0) == MAP_FAILED) die("cannot map %zu bytes", part);
    }
}

void unmap(uintptr_t begin, size_t num_bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    if (mmap(reinterpret_cast<void*>(begin), num_bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED) die("cannot unmap");
}

}  // namespace

std::string Allocation::name() const {
    char text[96];
    std::snprintf(text, sizeof text, "%s%llu of %zu bytes", is_freed ? "freed allocation " : "allocation ",
                  static_cast<unsigned long long>(number), size);
    return text;
}

Arena::Arena(Kind kind, const char* name, size_t num_bytes)
    : name_(name),
      num_bytes_(round_up(num_bytes, PAGE)),
      outer_(reserve(num_bytes_)),
      inner_(kind == Kind::Device ? reserve(num_bytes_) : outer_),
      next_(outer_) {}

Allocation* Arena::allocate(size_t size) {
    if (size > num_bytes_) return nullptr;
    const size_t used = round_up(std::max<size_t>(size, 1), ALIGNMENT);
    const size_t num_page_bytes = round_up(used, PAGE);
    const uintptr_t first_page = place(num_page_bytes);
    if (first_page == 0) return nullptr;
    map_poison(inner(first_page), num_page_bytes);
    Allocation& allocation = allocations_[first_page];
    allocation.begin = first_page + num_page_bytes - used;
    allocation.size = size;
    allocation.first_page = first_page;
    allocation.num_page_bytes = num_page_bytes;
    allocation.number = ++num_allocations_;
    next_ = first_page + num_page_bytes + GUARD;
    return &allocation;
}

bool Arena::free(uintptr_t begin) {
    Allocation* allocation = find_live(begin);
    if (allocation == nullptr) return false;
    check_slack(*allocation);
    unmap(inner(allocation->first_page), allocation->num_page_bytes);
    allocation->is_freed = true;
    freed_.push_back(allocation->first_page);
    if (freed_.size() > MAX_REMEMBERED) forget(freed_.front());
    return true;
}

const Allocation* Arena::find(uintptr_t address) const {
    auto next = allocations_.upper_bound(address);
    if (next == allocations_.begin()) return nullptr;
    const Allocation& allocation = std::prev(next)->second;
    return address - allocation.first_page < allocation.num_page_bytes + GUARD ? &allocation : nullptr;
}

Allocation* Arena::find_live(uintptr_t begin) {
    auto next = allocations_.upper_bound(begin);
    if (next == allocations_.begin()) return nullptr;
    Allocation& allocation = std::prev(next)->second;
    return allocation.begin == begin && !allocation.is_freed ? &allocation : nullptr;
}

std::string Arena::describe(uintptr_t address) const {
    const Allocation* allocation = find(address);
    if (allocation == nullptr) return std::string("an address of ") + name_ + " that is not allocated";
    char text[160];
    const long long offset = static_cast<long long>(address) - static_cast<long long>(allocation->begin);
    std::snprintf(text, sizeof text, "byte %lld of %s in %s", offset, allocation->name().c_str(), name_);
    return text;
}

// The next free range after the last one; from the beginning once the end is reached.
uintptr_t Arena::place(size_t num_page_bytes) {
    const size_t needed = num_page_bytes + GUARD;
    const uintptr_t end = outer_ + num_bytes_;
    for (const uintptr_t start : {next_, outer_}) {
        uintptr_t candidate = start;
        for (auto at = first_around(start); at != allocations_.end() && at->first < candidate + needed; ++at) {
            const uintptr_t last = at->first + at->second.num_page_bytes + GUARD;
            if (!at->second.is_freed && last > candidate) candidate = last;
        }
        if (candidate > end || needed > end - candidate) continue;
        // What was there is forgotten.
        for (auto at = first_around(candidate); at != allocations_.end() && at->first < candidate + needed;) {
            const uintptr_t first_page = at->first;
            const bool overlaps = first_page + at->second.num_page_bytes + GUARD > candidate;
            ++at;
            if (overlaps) forget(first_page);
        }
        return candidate;
    }
    return 0;
}

// The first allocation that may reach to an address or beyond.
Arena::Allocations::const_iterator Arena::first_around(uintptr_t address) const {
    const auto next = allocations_.upper_bound(address);
    return next == allocations_.begin() ? next : std::prev(next);
}

void Arena::forget(uintptr_t first_page) {
    allocations_.erase(first_page);
    freed_.erase(std::find(freed_.begin(), freed_.end(), first_page));
}

void Arena::check_slack(const Allocation& allocation) const {
    const auto check = [&](uintptr_t begin, uintptr_t end) {
        for (uintptr_t at = begin; at < end; ++at) {
            const uint8_t expected = static_cast<uint8_t>(at % 2 == 0 ? POISON & 0xff : POISON >> 8);
            if (*reinterpret_cast<const uint8_t*>(inner(at)) != expected) {
                die("somebody wrote beyond an allocation: to %s", describe(at).c_str());
            }
        }
    };
    check(allocation.first_page, allocation.begin);
    check(allocation.begin + allocation.size, allocation.first_page + allocation.num_page_bytes);
}

}  // namespace stand_in
