// Streams, which run late: work waits in a queue until somebody waits for it, and streams that nothing orders run in a
// random order. So whoever forgets to wait, or to record an event, gets wrong results.
#pragma once
#include <deque>
#include <functional>
#include <string>

#include "driver.h"

namespace stand_in {

struct KernelCall;

// One thing that a device does. It may run several times, if it is in a graph.
struct Work {
    enum class Kind { Kernel, Copy, Set, Memory, Callback, Empty };

    Kind kind;
    std::string name;           // for messages
    std::function<void()> run;  // without the driver's mutex
    // Instead of it, for work that waits for another device: called again and again until it returns true.
    std::function<bool()> poll = nullptr;
    std::string details = {};  // for the option PRINT_WORK: a kernel's shape and arguments
};

// The end of the work that a stream had at some time.
struct Point {
    std::shared_ptr<Stream> stream;
    uint64_t position = 0;

    bool is_reached() const;
};

// What stands in the queue of a stream: work, or a graph of it.
struct Operation {
    std::string name;
    std::function<bool()> step;  // runs a part, without the driver's mutex; true if it was the last one
    std::vector<Point> after;    // in other streams
};

struct Stream {
    std::shared_ptr<Context> context;
    CUstream handle = nullptr;
    bool is_legacy = false;
    bool waits_for_legacy = true;  // false: CU_STREAM_NON_BLOCKING
    unsigned flags = 0;
    int priority = 0;

    std::deque<Operation> queue;
    uint64_t num_enqueued = 0;
    uint64_t num_done = 0;
    bool is_running = false;  // its first operation, on some thread
    bool is_destroyed = false;

    // While the stream is captured: where, and the nodes that whatever comes next depends on.
    std::shared_ptr<Capture> capture;
    std::vector<size_t> frontier;
};

// The default streams belong to the context; others may belong to any. Null if there is no such stream.
// https://docs.nvidia.com/cuda/cuda-c-programming-guide, "Stream and Event Behavior" of multi-device systems
std::shared_ptr<Stream> find_stream(Context& context, CUstream handle);

// Runs body(lock, stream), unless the stream's device is lost.
template <class Body>
CUresult in_stream(CUstream handle, Body body) {
    return in_context([&](Lock& lock, Context& current) {
        const std::shared_ptr<Stream> stream = find_stream(current, handle);
        if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
        const Context& context = *stream->context;
        if (context.lost != CUDA_SUCCESS) return context.lost;
        const CUresult result = body(lock, *stream);
        return context.lost != CUDA_SUCCESS ? context.lost : result;
    });
}

// The streams that a context begins with.
void add_default_streams(const std::shared_ptr<Context>& context);

// Appends work to a stream, or to the graph that captures the stream.
CUresult enqueue(Lock& lock, Stream& stream, Work work);

// Appends an operation behind what the stream's rules put before it. The stream must not be captured.
void append(Lock& lock, Stream& stream, Operation operation);

// Runs one work now, unless the device is lost. Without the driver's mutex. False if it has to be run again.
bool run(Context& context, const Work& work);

Point end_of(Stream& stream);

// Runs work until a point is reached: at random only what it needs, or whatever can run.
void run_until(Lock& lock, const Point& target);

// Runs a little, for programs that ask again and again whether something is done.
void run_some(Lock& lock);

// Starts a thread that runs work of its own accord, a part every so often.
void start_background(uint64_t pause_ms);

// Runs all work of a context.
void finish(Lock& lock, Context& context);

}  // namespace stand_in
