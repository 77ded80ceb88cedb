// What the ranks of a communicator share: memory of the host, named by the unique id, so that ranks may be threads or
// processes.
#pragma once
#include <atomic>
#include <string>

#include "api.h"

namespace stand_in::nccl {

constexpr int MAX_RANKS = 16;
// The most bytes that a rank gives to an operation.
constexpr size_t MAX_BYTES = size_t{64} << 20;

// What all ranks of an operation must agree on.
struct Label {
    uint64_t kind;
    uint64_t count;

    bool operator==(const Label& other) const { return kind == other.kind && count == other.count; }
};

// A rank. Operations are numbered from 0 on; even and odd ones have a buffer each.
struct Rank {
    std::atomic<uint32_t> is_present;
    std::atomic<size_t> device_hash;  // of the UUID of its device
    std::atomic<int32_t> num_ranks;
    std::atomic<uint64_t> num_published;
    std::atomic<uint64_t> num_read;
    Label labels[2];
};

struct Header {
    Rank ranks[MAX_RANKS];
    std::atomic<int32_t> failure;  // an ncclResult_t, once ranks have called different operations
};

class World {
public:
    // Null if the system refuses it.
    static World* open(const std::string& name);
    ~World();
    World(const World&) = delete;

    Header& header() const { return *static_cast<Header*>(memory_); }
    float* buffer(int rank, uint64_t number) const;
    // No other rank will open it.
    void forget_name() const;

private:
    World(std::string name, void* memory) : name_(std::move(name)), memory_(memory) {}

    std::string name_;
    void* memory_;
};

}  // namespace stand_in::nccl
