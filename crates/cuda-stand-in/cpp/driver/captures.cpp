#include "captures.h"

#include <algorithm>

#include "reports.h"

namespace stand_in {
namespace {

void finish_capture(const std::shared_ptr<Capture>& capture) {
    capture->is_finished = true;
    for (const auto& member : capture->members) {
        member->capture = nullptr;
        member->frontier.clear();
    }
    capture->members.clear();
    capture->origin = nullptr;
    std::erase(driver().captures, capture);
}

void add_all(std::vector<size_t>& nodes, const std::vector<size_t>& more) {
    for (const size_t node : more) {
        if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
    }
}

// Whether all work comes before the end of the stream that began the capture.
bool is_joined(const Capture& capture) {
    std::vector<bool> is_needed(capture.graph->nodes.size(), false);
    for (const size_t node : capture.origin->frontier) is_needed[node] = true;
    for (const Node& node : capture.graph->nodes) {
        for (const size_t before : node.after) is_needed[before] = true;
    }
    return std::all_of(is_needed.begin(), is_needed.end(), [](bool needed) { return needed; });
}

}  // namespace

void invalidate(Capture& capture) { capture.is_invalidated = true; }

void leave_capture(Stream& stream) {
    const auto capture = stream.capture;
    invalidate(*capture);
    if (capture->origin.get() == &stream) {
        finish_capture(capture);
        return;
    }
    std::erase_if(capture->members, [&](const auto& member) { return member.get() == &stream; });
    stream.capture = nullptr;
}

CUresult capture(Stream& stream, Work work) {
    Capture& capture = *stream.capture;
    if (capture.is_invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    capture.graph->nodes.push_back({std::move(work), stream.frontier});
    stream.frontier = {capture.graph->nodes.size() - 1};
    return CUDA_SUCCESS;
}

CUresult join(Stream& stream, const std::shared_ptr<Capture>& capture, const std::vector<size_t>& frontier) {
    if (capture->is_invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (capture->is_finished) {
        return refuse(CUDA_ERROR_CAPTURED_EVENT,
                      "cuStreamWaitEvent: the event was recorded in a capture that has ended");
    }
    if (stream.capture != nullptr && stream.capture != capture) {
        invalidate(*stream.capture);
        invalidate(*capture);
        return refuse(CUDA_ERROR_STREAM_CAPTURE_MERGE, "cuStreamWaitEvent would merge two captures");
    }
    if (stream.is_legacy) {
        invalidate(*capture);
        return refuse(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "the legacy stream waits for an event of a capture");
    }
    if (stream.capture == nullptr) {
        stream.capture = capture;
        capture->members.push_back(end_of(stream).stream);
    }
    add_all(stream.frontier, frontier);
    return CUDA_SUCCESS;
}

CUresult refuse_in_capture(const char* function) {
    const CUstreamCaptureMode mode = this_thread().capture_mode;
    if (mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
    bool is_forbidden = false;
    for (const auto& capture : driver().captures) {
        const bool is_own = capture->thread == std::this_thread::get_id();
        const bool forbids =
            is_own ? capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED
                   : mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (forbids) invalidate(*capture);
        is_forbidden |= forbids;
    }
    if (!is_forbidden) return CUDA_SUCCESS;
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "%s is not permitted while a stream is captured", function);
}

CUresult refuse_capturing(Stream& stream, const char* function) {
    invalidate(*stream.capture);
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "%s: the stream is captured", function);
}

CUresult refuse_captured_event(Capture& capture, const char* function) {
    invalidate(capture);
    return refuse(CUDA_ERROR_CAPTURED_EVENT, "%s: the event was last recorded in a capture", function);
}

CUresult refuse_implicit(const Stream& stream, const char* function) {
    if (!stream.is_legacy) return CUDA_SUCCESS;
    for (const auto& capture : driver().captures) {
        for (const auto& member : capture->members) {
            if (member->context != stream.context || !member->waits_for_legacy) continue;
            invalidate(*capture);
            return refuse(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                          "%s: the legacy stream would wait for a stream that is captured", function);
        }
    }
    return CUDA_SUCCESS;
}

}  // namespace stand_in

using namespace stand_in;

API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    return with_driver([&](Lock&) {
        if (*mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
            return CUDA_ERROR_INVALID_VALUE;
        std::swap(this_thread().capture_mode, *mode);
        return CUDA_SUCCESS;
    });
}

API CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
    static uint64_t num_captures = 0;
    return in_stream(handle, [&](Lock&, Stream& found) {
        const auto stream = end_of(found).stream;
        if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED)
            return CUDA_ERROR_INVALID_VALUE;
        if (stream->is_legacy) {
            return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the legacy default stream cannot be captured");
        }
        if (stream->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
        auto capture = std::make_shared<Capture>();
        capture->graph = std::make_shared<Graph>();
        capture->graph->context = stream->context;
        capture->origin = stream;
        capture->members = {stream};
        capture->mode = mode;
        capture->thread = std::this_thread::get_id();
        capture->number = ++num_captures;
        stream->capture = capture;
        driver().captures.push_back(capture);
        return CUDA_SUCCESS;
    });
}

API CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
    *graph = nullptr;
    return in_stream(handle, [&](Lock&, Stream& stream) {
        const auto capture = stream.capture;
        if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
        if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id()) {
            return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
        }
        if (capture->origin.get() != &stream) {
            invalidate(*capture);
            return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
        }
        CUresult result = CUDA_SUCCESS;
        if (capture->is_invalidated) {
            result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        } else if (!is_joined(*capture)) {
            result = refuse(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "a captured stream has work that nothing waits for");
        } else {
            *graph = driver().graphs.insert(capture->graph);
        }
        finish_capture(capture);
        return result;
    });
}

API CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
    return in_stream(handle, [&](Lock&, Stream& stream) {
        if (const CUresult error = refuse_implicit(stream, "cuStreamIsCapturing"); error != CUDA_SUCCESS) return error;
        *status = CU_STREAM_CAPTURE_STATUS_NONE;
        if (stream.capture != nullptr) {
            const bool is_invalidated = stream.capture->is_invalidated;
            *status = is_invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
        }
        return CUDA_SUCCESS;
    });
}
