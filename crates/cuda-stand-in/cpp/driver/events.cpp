#include "events.h"

#include "captures.h"
#include "reports.h"

using namespace stand_in;

API CUresult cuEventCreate(CUevent* handle, unsigned flags) {
    return in_context([&](Lock&, Context& context) {
        auto event = std::make_shared<Event>();
        event->context = context.legacy->context;
        event->has_time = (flags & CU_EVENT_DISABLE_TIMING) == 0;
        *handle = driver().events.insert(event);
        return CUDA_SUCCESS;
    });
}

// Who waits for the event already does so all the same.
API CUresult cuEventDestroy_v2(CUevent handle) {
    return in_context([&](Lock&, Context&) {
        if (driver().events.remove(handle) != nullptr) return CUDA_SUCCESS;
        return refuse(CUDA_ERROR_INVALID_HANDLE, "cuEventDestroy_v2: no such event");
    });
}

API CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    return in_stream(stream_handle, [&](Lock& lock, Stream& stream) {
        const auto event = driver().events.find(handle);
        if (event == nullptr || event->context != stream.context) {
            return refuse(CUDA_ERROR_INVALID_HANDLE, "cuEventRecord: no such event in the stream's context");
        }
        if (stream.capture != nullptr) {
            if (stream.capture->is_invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
            event->capture = stream.capture;
            event->frontier = stream.frontier;
            event->last = {};
            return CUDA_SUCCESS;
        }
        if (const CUresult error = refuse_implicit(stream, "cuEventRecord"); error != CUDA_SUCCESS) return error;
        event->capture = nullptr;
        event->time = std::make_shared<Event::Clock::time_point>();
        append(lock, stream,
               {"an event",
                [time = event->time] {
                    *time = Event::Clock::now();
                    return true;
                },
                {}});
        event->last = end_of(stream);
        return CUDA_SUCCESS;
    });
}

API CUresult cuEventRecordWithFlags(CUevent handle, CUstream stream, unsigned) { return cuEventRecord(handle, stream); }

// Waits for the last record before this call; later records change nothing.
API CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned) {
    return in_stream(stream_handle, [&](Lock& lock, Stream& stream) {
        const auto event = driver().events.find(handle);
        if (event == nullptr) return refuse(CUDA_ERROR_INVALID_HANDLE, "cuStreamWaitEvent: no such event");
        if (event->capture != nullptr) return join(stream, event->capture, event->frontier);
        if (event->last.stream == nullptr) return CUDA_SUCCESS;
        if (stream.capture != nullptr) {
            invalidate(*stream.capture);
            return refuse(
                CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
                "cuStreamWaitEvent: a captured stream waits for an event that was recorded outside of the capture");
        }
        if (const CUresult error = refuse_implicit(stream, "cuStreamWaitEvent"); error != CUDA_SUCCESS) return error;
        append(lock, stream, {"a wait", [] { return true; }, {event->last}});
        return CUDA_SUCCESS;
    });
}

API CUresult cuEventSynchronize(CUevent handle) {
    return in_context([&](Lock& lock, Context&) {
        const auto event = driver().events.find(handle);
        if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
        if (event->capture != nullptr) return refuse_captured_event(*event->capture, "cuEventSynchronize");
        if (const CUresult error = refuse_in_capture("cuEventSynchronize"); error != CUDA_SUCCESS) return error;
        const Point last = event->last;
        run_until(lock, last);
        return CUDA_SUCCESS;
    });
}

API CUresult cuEventQuery(CUevent handle) {
    return in_context([&](Lock& lock, Context&) {
        const auto event = driver().events.find(handle);
        if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
        if (event->capture != nullptr) return refuse_captured_event(*event->capture, "cuEventQuery");
        if (const CUresult error = refuse_in_capture("cuEventQuery"); error != CUDA_SUCCESS) return error;
        const Point last = event->last;
        run_some(lock);
        return last.is_reached() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    });
}

API CUresult cuEventElapsedTime(float* milliseconds, CUevent first, CUevent second) {
    return in_context([&](Lock&, Context&) {
        const auto start = driver().events.find(first);
        const auto end = driver().events.find(second);
        for (const auto& event : {start, end}) {
            if (event == nullptr || !event->has_time || event->last.stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
        }
        if (!start->last.is_reached() || !end->last.is_reached()) return CUDA_ERROR_NOT_READY;
        *milliseconds = std::chrono::duration<float, std::milli>(*end->time - *start->time).count();
        return CUDA_SUCCESS;
    });
}

API CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent first, CUevent second) {
    return cuEventElapsedTime(milliseconds, first, second);
}
