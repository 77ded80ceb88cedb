#include "streams.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "captures.h"
#include "reports.h"

namespace stand_in {
namespace {

// A real stream takes about a thousand launches before a call waits for the device.
constexpr size_t MAX_QUEUED = 1024;

std::shared_ptr<Stream> new_stream(const std::shared_ptr<Context>& context) {
    auto stream = std::make_shared<Stream>();
    stream->context = context;
    context->streams.push_back(stream);
    return stream;
}

std::shared_ptr<Stream> shared(Stream& stream) {
    for (const auto& other : stream.context->streams) {
        if (other.get() == &stream) return other;
    }
    die("a stream is in no context");
}

bool can_run(const Stream& stream) {
    if (stream.queue.empty() || stream.is_running) return false;
    const auto& after = stream.queue.front().after;
    return std::all_of(after.begin(), after.end(), [](const Point& point) { return point.is_reached(); });
}

std::vector<std::shared_ptr<Stream>> streams_that_can_run() {
    std::vector<std::shared_ptr<Stream>> found;
    for (const auto& [handle, context] : driver().contexts.all()) {
        for (const auto& stream : context->streams) {
            if (can_run(*stream)) found.push_back(stream);
        }
    }
    return found;
}

// Streams whose first operation a point waits for, directly or not.
std::vector<std::shared_ptr<Stream>> streams_needed_by(const Point& target) {
    std::vector<std::shared_ptr<Stream>> open{target.stream};
    std::set<Stream*> seen;
    std::vector<std::shared_ptr<Stream>> found;
    while (!open.empty()) {
        const auto stream = open.back();
        open.pop_back();
        if (!seen.insert(stream.get()).second || stream->queue.empty()) continue;
        if (can_run(*stream)) found.push_back(stream);
        for (const Point& point : stream->queue.front().after) {
            if (!point.is_reached()) open.push_back(point.stream);
        }
    }
    return found;
}

bool is_anything_running() {
    for (const auto& [handle, context] : driver().contexts.all()) {
        for (const auto& stream : context->streams) {
            if (stream->is_running) return true;
        }
    }
    return false;
}

// Runs the next part of a stream's first operation.
void step(Lock& lock, const std::shared_ptr<Stream>& stream) {
    stream->is_running = true;
    Operation operation = std::move(stream->queue.front());
    lock.unlock();
    const bool is_done = operation.step();
    lock.lock();
    stream->is_running = false;
    if (is_done) {
        stream->queue.pop_front();
        ++stream->num_done;
        if (stream->is_destroyed && stream->queue.empty()) std::erase(stream->context->streams, stream);
    } else {
        stream->queue.front() = std::move(operation);
    }
    driver().changed.notify_all();
}

// Runs one part of one of these streams; false if none can run now.
bool step_one_of(Lock& lock, const std::vector<std::shared_ptr<Stream>>& streams) {
    if (streams.empty()) return false;
    step(lock, streams[driver().random() % streams.size()]);
    return true;
}

}  // namespace

bool Point::is_reached() const { return stream == nullptr || stream->num_done >= position; }

Point end_of(Stream& stream) { return {shared(stream), stream.num_enqueued}; }

void add_default_streams(const std::shared_ptr<Context>& context) {
    context->legacy = new_stream(context);
    context->legacy->is_legacy = true;
}

std::shared_ptr<Stream> find_stream(Context& context, CUstream handle) {
    const uintptr_t number = reinterpret_cast<uintptr_t>(handle);
    if (number == 0 || number == CU_STREAM_LEGACY) return context.legacy;
    if (number == CU_STREAM_PER_THREAD) {
        auto& known = this_thread().default_streams[&context];
        auto stream = known.lock();
        if (stream == nullptr || stream->context.get() != &context) {
            stream = new_stream(context.legacy->context);
            known = stream;
        }
        return stream;
    }
    return driver().streams.find(handle);
}

CUresult enqueue(Lock& lock, Stream& stream, Work work) {
    if (driver().options.print_work != 0) {
        note("work of device %d: %s%s", stream.context->device.ordinal, work.name.c_str(), work.details.c_str());
    }
    if (stream.capture != nullptr) return capture(stream, std::move(work));
    if (const CUresult error = refuse_implicit(stream, work.name.c_str()); error != CUDA_SUCCESS) return error;
    Context* context = stream.context.get();
    std::string name = work.name;
    append(lock, stream,
           {std::move(name),
            [context, work = std::move(work)] { return run(*context, work); },
            {}});
    return CUDA_SUCCESS;
}

// The legacy default stream waits for all streams that have not opted out, and they wait for it.
// https://docs.nvidia.com/cuda/cuda-driver-api/stream-sync-behavior.html
void append(Lock& lock, Stream& stream, Operation operation) {
    Context& context = *stream.context;
    if (stream.is_legacy) {
        for (const auto& other : context.streams) {
            if (!other->is_legacy && other->waits_for_legacy) operation.after.push_back(end_of(*other));
        }
    } else if (stream.waits_for_legacy) {
        operation.after.push_back(end_of(*context.legacy));
    }
    stream.queue.push_back(std::move(operation));
    ++stream.num_enqueued;
    if (stream.queue.size() > MAX_QUEUED) {
        const auto waiting = shared(stream);
        run_until(lock, {waiting, stream.num_enqueued - MAX_QUEUED});
    }
}

bool run(Context& context, const Work& work) {
    {
        Lock lock(driver().mutex);
        if (context.lost != CUDA_SUCCESS) return true;
    }
    const char* before = this_thread().running;
    this_thread().running = work.name.c_str();
    const bool is_done = !work.poll || work.poll();
    this_thread().running = before;
    if (!is_done) return false;
    {
        Lock lock(driver().mutex);
        if (work.kind != Work::Kind::Empty && driver().options.lose_device.strikes()) {
            context.lost = static_cast<CUresult>(driver().options.lost_error);
            note("device %d is lost on purpose at %s", context.device.ordinal, work.name.c_str());
            return true;
        }
    }
    this_thread().running = work.name.c_str();
    if (work.run) work.run();
    this_thread().running = before;
    return true;
}

void run_until(Lock& lock, const Point& target) {
    // Half of the waits leave whatever they do not need as late as it can be; the others mix all streams.
    const bool runs_only_needed = driver().random() % 2 == 0;
    while (!target.is_reached()) {
        const auto streams = runs_only_needed ? streams_needed_by(target) : streams_that_can_run();
        if (step_one_of(lock, streams)) continue;
        if (!is_anything_running()) die("streams wait for each other");
        driver().changed.wait(lock);
    }
}

void run_some(Lock& lock) { step_one_of(lock, streams_that_can_run()); }

void start_background(uint64_t pause_ms) {
    std::thread([pause_ms] {
        for (;;) {
            std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
            Lock lock(driver().mutex);
            run_some(lock);
        }
    }).detach();
}

void finish(Lock& lock, Context& context) {
    const auto streams = context.streams;
    for (const auto& stream : streams) run_until(lock, {stream, stream->num_enqueued});
}

}  // namespace stand_in

using namespace stand_in;

namespace {

CUresult create_stream(CUstream* handle, unsigned flags, int priority) {
    return in_context([&](Lock&, Context& context) {
        if (flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
        const auto stream = new_stream(context.legacy->context);
        stream->flags = flags;
        stream->waits_for_legacy = flags != CU_STREAM_NON_BLOCKING;
        stream->priority = priority;
        stream->handle = *handle = driver().streams.insert(stream);
        return CUDA_SUCCESS;
    });
}

}  // namespace

API CUresult cuStreamCreate(CUstream* handle, unsigned flags) { return create_stream(handle, flags, 0); }

// Priorities are remembered, and change nothing.
API CUresult cuStreamCreateWithPriority(CUstream* handle, unsigned flags, int priority) {
    return create_stream(handle, flags, priority);
}

// What is in the stream still runs.
API CUresult cuStreamDestroy_v2(CUstream handle) {
    return in_context([&](Lock&, Context&) {
        const auto stream = driver().streams.find(handle);
        if (stream == nullptr) return refuse(CUDA_ERROR_INVALID_HANDLE, "cuStreamDestroy_v2: no such stream");
        if (stream->capture != nullptr) leave_capture(*stream);
        driver().streams.remove(handle);
        stream->is_destroyed = true;
        if (stream->queue.empty()) std::erase(stream->context->streams, stream);
        return CUDA_SUCCESS;
    });
}

API CUresult cuStreamSynchronize(CUstream handle) {
    return in_stream(handle, [](Lock& lock, Stream& stream) {
        if (stream.capture != nullptr) return refuse_capturing(stream, "cuStreamSynchronize");
        if (const CUresult error = refuse_in_capture("cuStreamSynchronize"); error != CUDA_SUCCESS) return error;
        run_until(lock, end_of(stream));
        return CUDA_SUCCESS;
    });
}

API CUresult cuStreamQuery(CUstream handle) {
    return in_stream(handle, [](Lock& lock, Stream& stream) {
        if (stream.capture != nullptr) return refuse_capturing(stream, "cuStreamQuery");
        if (const CUresult error = refuse_in_capture("cuStreamQuery"); error != CUDA_SUCCESS) return error;
        const Point end = end_of(stream);
        run_some(lock);
        return end.is_reached() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    });
}

API CUresult cuStreamGetFlags(CUstream handle, unsigned* flags) {
    return in_stream(handle, [&](Lock&, Stream& stream) {
        *flags = stream.flags;
        return CUDA_SUCCESS;
    });
}

API CUresult cuStreamGetPriority(CUstream handle, int* priority) {
    return in_stream(handle, [&](Lock&, Stream& stream) {
        *priority = stream.priority;
        return CUDA_SUCCESS;
    });
}

API CUresult cuStreamGetCtx(CUstream handle, CUcontext* context_handle) {
    return in_stream(handle, [&](Lock&, Stream& stream) {
        *context_handle = stream.context->handle;
        return CUDA_SUCCESS;
    });
}

API CUresult cuLaunchHostFunc(CUstream handle, void (*function)(void*), void* data) {
    return in_stream(handle, [&](Lock& lock, Stream& stream) {
        if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
        return enqueue(lock, stream, {Work::Kind::Callback, "a host function", [function, data] {
                                          this_thread().is_in_callback = true;
                                          function(data);
                                          this_thread().is_in_callback = false;
                                      }});
    });
}
