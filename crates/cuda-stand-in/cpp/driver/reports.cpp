#include "reports.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace stand_in {
namespace {

// One write a message, so that messages of several threads do not mix.
void print(const char* format, va_list values) {
    char line[1024];
    std::vsnprintf(line, sizeof line, format, values);
    std::fprintf(stderr, "cuda-stand-in: %s\n", line);
}

}  // namespace

CUresult refuse(CUresult error, const char* format, ...) {
    va_list values;
    va_start(values, format);
    print(format, values);
    va_end(values);
    return error;
}

void die(const char* format, ...) {
    va_list values;
    va_start(values, format);
    print(format, values);
    va_end(values);
    std::abort();
}

void note(const char* format, ...) {
    va_list values;
    va_start(values, format);
    print(format, values);
    va_end(values);
}

}  // namespace stand_in

// https://docs.nvidia.com/cuda/cuda-driver-api, "CUresult".
#define NAMES(name)                                                                                                    \
    name(CUDA_SUCCESS, "no error") name(CUDA_ERROR_INVALID_VALUE, "invalid argument")                                  \
        name(CUDA_ERROR_OUT_OF_MEMORY, "out of memory") name(CUDA_ERROR_NOT_INITIALIZED, "initialization error") name( \
            CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")                                                \
            name(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal") name(                                            \
                CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid") name(CUDA_ERROR_INVALID_CONTEXT,           \
                                                                                 "invalid device context")             \
                name(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image for the device") name(                             \
                    CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "unsupported PTX version") name(CUDA_ERROR_INVALID_HANDLE,     \
                                                                                        "invalid resource handle")     \
                    name(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed now") name(                      \
                        CUDA_ERROR_NOT_FOUND, "named symbol not found") name(CUDA_ERROR_NOT_READY, "device not ready") \
                        name(CUDA_ERROR_ILLEGAL_ADDRESS, "illegal memory access") name(                                \
                            CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested")                        \
                            name(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is enabled") name(               \
                                CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,                                             \
                                "already registered") name(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "not registered")    \
                                name(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure") name(                     \
                                    CUDA_ERROR_NOT_PERMITTED, "operation not permitted")                               \
                                    name(CUDA_ERROR_NOT_SUPPORTED, "operation not supported") name(                    \
                                        CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "driver versions differ")                   \
                                        name(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "not permitted in capture") name(  \
                                            CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "the capture failed before")        \
                                            name(CUDA_ERROR_STREAM_CAPTURE_MERGE, "would merge two captures") name(    \
                                                CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "not begun in this stream")       \
                                                name(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "unjoined work in a capture") \
                                                    name(CUDA_ERROR_STREAM_CAPTURE_ISOLATION,                          \
                                                         "dependency out of a capture")                                \
                                                        name(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,                       \
                                                             "depends on the legacy stream")                           \
                                                            name(CUDA_ERROR_CAPTURED_EVENT,                            \
                                                                 "the event was recorded in a capture")                \
                                                                name(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,           \
                                                                     "capture of other thread")                        \
                                                                    name(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE,         \
                                                                         "the graph cannot be updated")                \
                                                                        name(CUDA_ERROR_UNKNOWN, "unknown error")

API CUresult cuGetErrorName(CUresult error, const char** text) {
    switch (error) {
#define CASE(value, meaning) \
    case value: *text = #value; return CUDA_SUCCESS;
        NAMES(CASE)
#undef CASE
    }
    *text = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult error, const char** text) {
    switch (error) {
#define CASE(value, meaning) \
    case value: *text = meaning " (from the stand-in)"; return CUDA_SUCCESS;
        NAMES(CASE)
#undef CASE
    }
    *text = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}
