// The one driver of the process, and what every function of the API does first.
#pragma once
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <vector>

#include "../api.h"
#include "arena.h"
#include "handles.h"
#include "options.h"

namespace stand_in {

struct Capture;
struct Context;
struct Event;
struct Function;
struct Graph;
struct GraphExec;
struct Module;
struct Stream;

using Lock = std::unique_lock<std::mutex>;

struct Device {
    Device(int ordinal, size_t num_bytes);

    int ordinal;
    size_t total_bytes;
    size_t used_bytes = 0;
    std::string name;
    Arena memory;
    int num_retained = 0;              // of the primary context
    std::shared_ptr<Context> primary;  // null while nobody retains it
};

// The primary context of a device; the stand-in has no others.
struct Context {
    explicit Context(Device& of) : device(of) {}

    Device& device;
    CUcontext handle = nullptr;
    CUresult lost = CUDA_SUCCESS;  // once the device is lost, every call returns this
    std::shared_ptr<Stream> legacy;
    std::vector<std::shared_ptr<Stream>> streams;  // all, destroyed ones until their work is done
    std::set<int> peers;                           // devices whose memory may be used here
};

// A single mutex guards everything. It is not held while work runs.
struct Driver {
    std::mutex mutex;
    std::condition_variable changed;  // work has run
    bool is_initialized = false;
    Options options;
    std::mt19937_64 random;
    std::vector<std::unique_ptr<Device>> devices;
    std::unique_ptr<Arena> host_memory;      // pinned
    std::map<uintptr_t, size_t> registered;  // other host memory that programs have pinned: begin and bytes
    std::vector<std::shared_ptr<Capture>> captures;
    size_t num_leaks = 0;

    Handles<Context, CUcontext> contexts;
    Handles<Stream, CUstream> streams;
    Handles<Event, CUevent> events;
    Handles<Graph, CUgraph> graphs;
    Handles<GraphExec, CUgraphExec> graph_execs;
    Handles<Module, CUmodule> modules;
    Handles<Function, CUfunction> functions;
};

// Never destroyed, because threads may call the driver while the process exits.
Driver& driver();

struct ThreadState {
    CUcontext current = nullptr;
    CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    bool is_in_callback = false;                                // functions that streams call must not call the driver
    const char* running = nullptr;                              // the operation that this thread runs, for messages
    std::map<Context*, std::weak_ptr<Stream>> default_streams;  // CU_STREAM_PER_THREAD
};

ThreadState& this_thread();

// Runs body(lock) if the driver is initialised.
template <class Body>
CUresult with_driver(Body body) {
    if (this_thread().is_in_callback) return CUDA_ERROR_NOT_PERMITTED;
    Lock lock(driver().mutex);
    if (!driver().is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
    return body(lock);
}

// Runs body(lock, context) in the thread's context, unless its device is lost. An error that the device has met while
// the body ran is returned too.
template <class Body>
CUresult in_context(Body body) {
    return with_driver([&](Lock& lock) {
        const std::shared_ptr<Context> context = driver().contexts.find(this_thread().current);
        if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
        if (context->lost != CUDA_SUCCESS) return context->lost;
        const CUresult result = body(lock, *context);
        return context->lost != CUDA_SUCCESS ? context->lost : result;
    });
}

// Runs body(lock, device).
template <class Body>
CUresult with_device(CUdevice ordinal, Body body) {
    return with_driver([&](Lock& lock) {
        auto& devices = driver().devices;
        if (ordinal < 0 || static_cast<size_t>(ordinal) >= devices.size()) return CUDA_ERROR_INVALID_DEVICE;
        return body(lock, *devices[static_cast<size_t>(ordinal)]);
    });
}

}  // namespace stand_in
