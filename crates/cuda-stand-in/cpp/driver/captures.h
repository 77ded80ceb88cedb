// Captures: streams whose work is collected in a graph instead of being run, and what is forbidden meanwhile.
#pragma once
#include <thread>

#include "graphs.h"
#include "streams.h"

namespace stand_in {

struct Capture {
    std::shared_ptr<Graph> graph;
    std::shared_ptr<Stream> origin;                // the stream that began it
    std::vector<std::shared_ptr<Stream>> members;  // streams that are captured, the origin included
    CUstreamCaptureMode mode;
    std::thread::id thread;
    uint64_t number;
    bool is_invalidated = false;
    bool is_finished = false;
};

// Adds work to the graph of a captured stream.
CUresult capture(Stream& stream, Work work);

// A stream waits for an event that was recorded in a capture: it becomes part of the capture.
CUresult join(Stream& stream, const std::shared_ptr<Capture>& capture, const std::vector<size_t>& frontier);

// The graph of the capture is lost, as after every call that the capture forbids.
void invalidate(Capture& capture);

// A captured stream is destroyed.
void leave_capture(Stream& stream);

// For calls that might wait for the device or change it as a whole: CUDA_SUCCESS, unless this thread or, in the mode
// GLOBAL, another one is capturing.
// https://docs.nvidia.com/cuda/cuda-driver-api, cuThreadExchangeStreamCaptureMode
CUresult refuse_in_capture(const char* function);

// For calls that a captured stream cannot take.
CUresult refuse_capturing(Stream& stream, const char* function);

CUresult refuse_captured_event(Capture& capture, const char* function);

// For work in the legacy stream, which would depend on captured streams.
CUresult refuse_implicit(const Stream& stream, const char* function);

}  // namespace stand_in
