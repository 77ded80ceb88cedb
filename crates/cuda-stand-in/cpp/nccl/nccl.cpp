// The functions of NCCL that the project calls. Operations run on the stand-in's streams, and can be captured.
//
// As with NCCL, an operation whose other ranks never come does not end until its communicator is aborted, and an abort
// is known to this rank alone. Where NCCL would hang or compute nonsense, ranks that call different operations, or with
// different counts, get ncclInvalidUsage from ncclCommGetAsyncError. In which order ranks are summed depends on the
// count, as NCCL's algorithms do.
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string_view>

#include "../shared.h"
#include "world.h"

extern "C" CUresult cuCtxGetDevice(CUdevice* device);
extern "C" CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice ordinal);
extern "C" CUresult cuCtxGetCurrent(CUcontext* context);
extern "C" CUresult cuStreamGetCtx(CUstream stream, CUcontext* context);

namespace stand_in::nccl {
namespace {

constexpr unsigned WAIT_US = 20;
constexpr int INIT_LIMIT_S = 120;
constexpr uint64_t ALL_REDUCE = 1, ALL_GATHER = 2;

struct Comm {
    std::unique_ptr<World> world;
    int rank, num_ranks;
    CUdevice device;
    std::atomic<bool> is_aborted = false;
    uint64_t num_done = 0;  // operations; they run one after the other

    ncclResult_t failure() const { return static_cast<ncclResult_t>(world->header().failure.load()); }
    bool has_ended() const { return is_aborted || failure() != ncclSuccess; }
    template <class Number>
    bool all(std::atomic<Number> Rank::*number, uint64_t least) const {
        for (int rank = 0; rank < num_ranks; ++rank) {
            if ((world->header().ranks[rank].*number).load(std::memory_order_acquire) < least) return false;
        }
        return true;
    }
};

struct Library {
    std::mutex mutex;
    std::map<ncclComm_t, std::shared_ptr<Comm>> comms;
    uintptr_t next = 16;
};

Library& library() {
    static Library* const library = new Library;
    return *library;
}

[[gnu::format(printf, 2, 3)]] ncclResult_t refuse(ncclResult_t result, const char* format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    std::fprintf(stderr, "cuda-stand-in: nccl: %s\n", text);
    return result;
}

std::shared_ptr<Comm> find(ncclComm_t handle) {
    std::lock_guard lock(library().mutex);
    const auto found = library().comms.find(handle);
    return found == library().comms.end() ? nullptr : found->second;
}

// One operation in a stream or in a graph, where it runs several times.
struct Operation {
    std::shared_ptr<Comm> comm;
    Label label;
    bool stalls;
    bool is_spoiled;
    bool has_published = false;
};

void reduce(const Comm& comm, uint64_t number, size_t count, float* out) {
    const int first = static_cast<int>(count % static_cast<size_t>(comm.num_ranks));
    std::memcpy(out, comm.world->buffer(first, number), count * sizeof(float));
    for (int i = 1; i < comm.num_ranks; ++i) {
        const float* values = comm.world->buffer((first + i) % comm.num_ranks, number);
        for (size_t at = 0; at < count; ++at) out[at] += values[at];
    }
}

// A part of it: true when all ranks have come, or none will.
bool advance(Operation& operation, const float* in, float* out) {
    Comm& comm = *operation.comm;
    const uint64_t number = comm.num_done;
    const auto [kind, count] = operation.label;
    Rank& own = comm.world->header().ranks[comm.rank];
    if (comm.has_ended()) {
        operation.has_published = false;
        return true;
    }
    if (!operation.has_published) {
        // Whoever has read the last operation but one has no use for this buffer any more.
        if (operation.stalls || (number >= 2 && !comm.all(&Rank::num_read, number - 1))) {
            usleep(WAIT_US);
            return false;
        }
        own.labels[number % 2] = operation.label;
        std::memcpy(comm.world->buffer(comm.rank, number), in, count * sizeof(float));
        own.num_published.store(number + 1, std::memory_order_release);
        operation.has_published = true;
    }
    if (!comm.all(&Rank::num_published, number + 1)) {
        usleep(WAIT_US);
        return false;
    }
    for (int rank = 0; rank < comm.num_ranks; ++rank) {
        if (comm.world->header().ranks[rank].labels[number % 2] == operation.label) continue;
        comm.world->header().failure = refuse(ncclInvalidUsage, "ranks %d and %d call different operations or counts",
                                              comm.rank, rank);
        operation.has_published = false;
        return true;
    }
    if (kind == ALL_REDUCE) {
        reduce(comm, number, count, out);
    } else {
        for (int rank = 0; rank < comm.num_ranks; ++rank) {
            const float* values = comm.world->buffer(rank, number);
            std::memcpy(out + static_cast<size_t>(rank) * count, values, count * sizeof(float));
        }
    }
    if (operation.is_spoiled) ++out[0];
    operation.has_published = false;
    ++comm.num_done;
    own.num_read.store(number + 1, std::memory_order_release);
    return true;
}

bool run(void* state, void* const* addresses) {
    return advance(*static_cast<Operation*>(state), static_cast<const float*>(addresses[0]),
                   static_cast<float*>(addresses[1]));
}

void drop(void* state) { delete static_cast<Operation*>(state); }

ncclResult_t enqueue(const char* name, ncclComm_t handle, Label label, size_t out_count, CUdeviceptr in,
                     CUdeviceptr out, ncclDataType_t type, CUstream stream) {
    const auto comm = find(handle);
    if (comm == nullptr) return refuse(ncclInvalidArgument, "%s: no such communicator", name);
    if (type != ncclFloat32) return refuse(ncclInvalidArgument, "%s: type %d is not there", name, type);
    const size_t num_bytes = label.count * sizeof(float);
    if (num_bytes > MAX_BYTES) return refuse(ncclInvalidArgument, "%s of %zu bytes", name, num_bytes);
    CUdevice device = -1;
    CUcontext current = nullptr, of_stream = nullptr;
    if (cuCtxGetDevice(&device) != CUDA_SUCCESS || device != comm->device) {
        return refuse(ncclInvalidArgument, "%s: the communicator is of device %d, and the thread's is %d", name,
                      comm->device, device);
    }
    if (cuCtxGetCurrent(&current) != CUDA_SUCCESS || cuStreamGetCtx(stream, &of_stream) != CUDA_SUCCESS ||
        current != of_stream) {
        return refuse(ncclInvalidArgument, "%s: the stream is of another device", name);
    }
    if (comm->has_ended()) return comm->is_aborted ? ncclInvalidUsage : comm->failure();
    if (cuStandInStrikes("FAIL_COLLECTIVE")) return refuse(ncclInternalError, "%s fails on purpose", name);
    const bool stalls = cuStandInStrikes("STALL_COLLECTIVE"), is_spoiled = cuStandInStrikes("SPOIL_COLLECTIVE");
    const CuStandInOperand operands[] = {{in, num_bytes}, {out, out_count * sizeof(float)}};
    const CUresult result =
        cuStandInEnqueue(stream, name, operands, 2, run, drop, new Operation{comm, label, stalls, is_spoiled});
    if (result == CUDA_SUCCESS) return ncclSuccess;
    return result == CUDA_ERROR_INVALID_VALUE ? ncclInvalidArgument : ncclUnhandledCudaError;
}

ncclResult_t remove(ncclComm_t handle, bool aborts) {
    const auto comm = find(handle);
    if (comm == nullptr) return refuse(ncclInvalidArgument, "no such communicator");
    if (aborts) comm->is_aborted = true;
    std::lock_guard lock(library().mutex);
    library().comms.erase(handle);
    return ncclSuccess;
}

}  // namespace
}  // namespace stand_in::nccl

using namespace stand_in::nccl;

API ncclResult_t ncclGetVersion(int* version) {
    *version = 21805;
    return ncclSuccess;
}

API const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclUnhandledCudaError: return "unhandled cuda error";
        case ncclSystemError: return "unhandled system error";
        case ncclInternalError: return "internal error";
        case ncclInvalidArgument: return "invalid argument";
        case ncclInvalidUsage: return "invalid usage";
        case ncclRemoteError: return "remote process exited or there was a network error";
    }
    return "unknown result code";
}

API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    std::random_device random;
    std::memset(id, 0, sizeof *id);
    std::snprintf(id->internal, sizeof id->internal, "/cuda-stand-in-nccl-%d-%08x%08x", getpid(), random(), random());
    return ncclSuccess;
}

// Waits for all ranks.
API ncclResult_t ncclCommInitRank(ncclComm_t* handle, int num_ranks, ncclUniqueId id, int rank) {
    if (num_ranks < 1 || num_ranks > MAX_RANKS || rank < 0 || rank >= num_ranks || id.internal[0] != '/') {
        return refuse(ncclInvalidArgument, "ncclCommInitRank: rank %d of %d", rank, num_ranks);
    }
    auto comm = std::make_shared<Comm>();
    if (cuCtxGetDevice(&comm->device) != CUDA_SUCCESS) {
        return refuse(ncclUnhandledCudaError, "ncclCommInitRank: the thread has no device");
    }
    comm->rank = rank;
    comm->num_ranks = num_ranks;
    id.internal[sizeof id.internal - 1] = '\0';
    comm->world.reset(World::open(id.internal));
    if (comm->world == nullptr) return refuse(ncclSystemError, "ncclCommInitRank: no shared memory");
    Header& header = comm->world->header();
    Rank& own = header.ranks[rank];
    CUuuid uuid;
    cuDeviceGetUuid_v2(&uuid, comm->device);
    own.device_hash = std::hash<std::string_view>{}({uuid.bytes, sizeof uuid.bytes});
    own.num_ranks = num_ranks;
    if (own.is_present.exchange(1) != 0) return refuse(ncclInvalidUsage, "ncclCommInitRank: two ranks are %d", rank);
    for (int i = 0; !comm->all(&Rank::is_present, 1); ++i) {
        if (i > INIT_LIMIT_S * 1000) return refuse(ncclSystemError, "ncclCommInitRank: a rank is missing");
        usleep(1000);
    }
    comm->world->forget_name();
    for (int other = 0; other < num_ranks; ++other) {
        const Rank& there = header.ranks[other];
        if (there.num_ranks != num_ranks) return refuse(ncclInvalidUsage, "ncclCommInitRank: numbers of ranks differ");
        if (other != rank && there.device_hash == own.device_hash) {
            return refuse(ncclInvalidUsage, "ncclCommInitRank: ranks %d and %d have device %d", rank, other,
                          comm->device);
        }
    }
    std::lock_guard lock(library().mutex);
    *handle = reinterpret_cast<ncclComm_t>(library().next);
    library().next += 16;
    library().comms[*handle] = std::move(comm);
    return ncclSuccess;
}

API ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* result) {
    const auto comm = find(handle);
    if (comm == nullptr) return refuse(ncclInvalidArgument, "ncclCommGetAsyncError: no such communicator");
    *result = comm->failure();
    return ncclSuccess;
}

API ncclResult_t ncclCommAbort(ncclComm_t handle) { return remove(handle, true); }

API ncclResult_t ncclCommDestroy(ncclComm_t handle) { return remove(handle, false); }

API ncclResult_t ncclAllReduce(CUdeviceptr in, CUdeviceptr out, size_t count, ncclDataType_t type, ncclRedOp_t sum,
                               ncclComm_t comm, CUstream stream) {
    if (sum != ncclSum) return refuse(ncclInvalidArgument, "ncclAllReduce: operation %d is not there", sum);
    return enqueue("ncclAllReduce", comm, {ALL_REDUCE, count}, count, in, out, type, stream);
}

// In place if `in` is this rank's part of `out`.
API ncclResult_t ncclAllGather(CUdeviceptr in, CUdeviceptr out, size_t count, ncclDataType_t type, ncclComm_t handle,
                               CUstream stream) {
    const auto comm = find(handle);
    const size_t num_ranks = comm == nullptr ? 1 : static_cast<size_t>(comm->num_ranks);
    return enqueue("ncclAllGather", handle, {ALL_GATHER, count}, num_ranks * count, in, out, type, stream);
}
