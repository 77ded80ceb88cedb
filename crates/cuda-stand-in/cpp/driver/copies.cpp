// Copies and fills. Copies from and to pinned memory run in stream order, whenever that is; pageable memory is copied
// to a staging buffer by the call itself, or waited for, as the driver documents:
// https://docs.nvidia.com/cuda/cuda-driver-api/api-sync-behavior.html
#include <cstring>

#include "captures.h"
#include "memory.h"
#include "reports.h"
#include "streams.h"

namespace stand_in {
namespace {

CUresult check_host(const char* function, const void* host) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(host);
    if (host == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (device_of(address) == nullptr) return CUDA_SUCCESS;
    return refuse(CUDA_ERROR_INVALID_VALUE, "%s: %p is device memory, where host memory is expected", function, host);
}

// A graph would read pageable memory at each launch, whatever then stands there. Drivers accept some such copies; the
// stand-in refuses them all.
CUresult refuse_pageable(Stream& stream, const char* function) {
    invalidate(*stream.capture);
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "%s: a captured copy needs pinned host memory", function);
}

CUresult to_device(Lock& lock, Stream& stream, const char* function, CUdeviceptr target, const void* host,
                   size_t size) {
    if (size == 0) return CUDA_SUCCESS;
    if (const CUresult error = check_range(function, target, size); error != CUDA_SUCCESS) return error;
    if (const CUresult error = check_host(function, host); error != CUDA_SUCCESS) return error;
    const uintptr_t source = reinterpret_cast<uintptr_t>(host);
    if (is_pinned(source, size)) {
        return enqueue(lock, stream, {Work::Kind::Copy, function, [=] {
                                          std::memcpy(resolve(target, size), resolve(source, size), size);
                                      }});
    }
    if (stream.capture != nullptr) return refuse_pageable(stream, function);
    const auto* bytes = static_cast<const unsigned char*>(host);
    const auto staged = std::make_shared<const std::vector<unsigned char>>(bytes, bytes + size);
    return enqueue(lock, stream,
                   {Work::Kind::Copy, function, [=] { std::memcpy(resolve(target, size), staged->data(), size); }});
}

CUresult to_host(Lock& lock, Stream& stream, const char* function, void* host, CUdeviceptr source, size_t size) {
    if (size == 0) return CUDA_SUCCESS;
    if (const CUresult error = check_range(function, source, size); error != CUDA_SUCCESS) return error;
    if (const CUresult error = check_host(function, host); error != CUDA_SUCCESS) return error;
    const uintptr_t target = reinterpret_cast<uintptr_t>(host);
    if (is_pinned(target, size)) {
        return enqueue(lock, stream, {Work::Kind::Copy, function, [=] {
                                          std::memcpy(resolve(target, size), resolve(source, size), size);
                                      }});
    }
    if (stream.capture != nullptr) return refuse_pageable(stream, function);
    const CUresult result =
        enqueue(lock, stream, {Work::Kind::Copy, function, [=] { std::memcpy(host, resolve(source, size), size); }});
    if (result == CUDA_SUCCESS) run_until(lock, end_of(stream));
    return result;
}

CUresult on_device(Lock& lock, Stream& stream, const char* function, CUdeviceptr target, CUdeviceptr source,
                   size_t size) {
    if (size == 0) return CUDA_SUCCESS;
    if (const CUresult error = check_range(function, target, size); error != CUDA_SUCCESS) return error;
    if (const CUresult error = check_range(function, source, size); error != CUDA_SUCCESS) return error;
    if (target < source + size && source < target + size) {
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: source and target overlap", function);
    }
    return enqueue(lock, stream, {Work::Kind::Copy, function, [=] {
                                      std::memcpy(resolve(target, size), resolve(source, size), size);
                                  }});
}

template <class Element>
CUresult fill(Lock& lock, Stream& stream, const char* function, CUdeviceptr target, Element value, size_t count) {
    if (count == 0) return CUDA_SUCCESS;
    if (count > SIZE_MAX / sizeof(Element) || target % sizeof(Element) != 0) return CUDA_ERROR_INVALID_VALUE;
    const size_t size = count * sizeof(Element);
    if (const CUresult error = check_range(function, target, size); error != CUDA_SUCCESS) return error;
    return enqueue(lock, stream, {Work::Kind::Set, function, [=] {
                                      auto* elements = static_cast<Element*>(resolve(target, size));
                                      std::fill(elements, elements + count, value);
                                  }});
}

// Runs body on the legacy default stream, for calls that return when the work is done.
template <class Body>
CUresult and_wait(const char* function, Body body) {
    return in_stream(nullptr, [&](Lock& lock, Stream& stream) {
        if (const CUresult error = refuse_in_capture(function); error != CUDA_SUCCESS) return error;
        const CUresult result = body(lock, stream);
        if (result == CUDA_SUCCESS) run_until(lock, end_of(stream));
        return result;
    });
}

}  // namespace
}  // namespace stand_in

using namespace stand_in;

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void* source, size_t size, CUstream handle) {
    return in_stream(handle, [&](Lock& lock, Stream& stream) {
        return to_device(lock, stream, "cuMemcpyHtoDAsync_v2", target, source, size);
    });
}

API CUresult cuMemcpyDtoHAsync_v2(void* target, CUdeviceptr source, size_t size, CUstream handle) {
    return in_stream(handle, [&](Lock& lock, Stream& stream) {
        return to_host(lock, stream, "cuMemcpyDtoHAsync_v2", target, source, size);
    });
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream handle) {
    return in_stream(handle, [&](Lock& lock, Stream& stream) {
        return on_device(lock, stream, "cuMemcpyDtoDAsync_v2", target, source, size);
    });
}

API CUresult cuMemcpyPeerAsync(CUdeviceptr target, CUcontext, CUdeviceptr source, CUcontext, size_t size,
                               CUstream handle) {
    return in_stream(handle, [&](Lock& lock, Stream& stream) {
        return on_device(lock, stream, "cuMemcpyPeerAsync", target, source, size);
    });
}

API CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream handle) {
    return in_stream(handle, [&](Lock& lock, Stream& stream) {
        const bool is_from_device = device_of(source) != nullptr;
        const bool is_to_device = device_of(target) != nullptr;
        if (is_from_device && is_to_device) return on_device(lock, stream, "cuMemcpyAsync", target, source, size);
        if (is_from_device)
            return to_host(lock, stream, "cuMemcpyAsync", reinterpret_cast<void*>(target), source, size);
        return to_device(lock, stream, "cuMemcpyAsync", target, reinterpret_cast<const void*>(source), size);
    });
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void* source, size_t size) {
    return and_wait("cuMemcpyHtoD_v2", [&](Lock& lock, Stream& stream) {
        return to_device(lock, stream, "cuMemcpyHtoD_v2", target, source, size);
    });
}

API CUresult cuMemcpyDtoH_v2(void* target, CUdeviceptr source, size_t size) {
    return and_wait("cuMemcpyDtoH_v2", [&](Lock& lock, Stream& stream) {
        return to_host(lock, stream, "cuMemcpyDtoH_v2", target, source, size);
    });
}

// Returns before the copy is done, as do fills of device memory.
API CUresult cuMemcpyDtoD_v2(CUdeviceptr target, CUdeviceptr source, size_t size) {
    return in_stream(nullptr, [&](Lock& lock, Stream& stream) {
        if (const CUresult error = refuse_in_capture("cuMemcpyDtoD_v2"); error != CUDA_SUCCESS) return error;
        return on_device(lock, stream, "cuMemcpyDtoD_v2", target, source, size);
    });
}

API CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t count, CUstream handle) {
    return in_stream(handle, [&](Lock& lock, Stream& stream) {
        return fill(lock, stream, "cuMemsetD8Async", target, value, count);
    });
}

API CUresult cuMemsetD16Async(CUdeviceptr target, unsigned short value, size_t count, CUstream handle) {
    return in_stream(handle, [&](Lock& lock, Stream& stream) {
        return fill(lock, stream, "cuMemsetD16Async", target, value, count);
    });
}

API CUresult cuMemsetD32Async(CUdeviceptr target, unsigned value, size_t count, CUstream handle) {
    return in_stream(handle, [&](Lock& lock, Stream& stream) {
        return fill(lock, stream, "cuMemsetD32Async", target, value, count);
    });
}

API CUresult cuMemsetD8_v2(CUdeviceptr target, unsigned char value, size_t count) {
    return in_stream(nullptr, [&](Lock& lock, Stream& stream) {
        if (const CUresult error = refuse_in_capture("cuMemsetD8_v2"); error != CUDA_SUCCESS) return error;
        return fill(lock, stream, "cuMemsetD8_v2", target, value, count);
    });
}

API CUresult cuMemsetD32_v2(CUdeviceptr target, unsigned value, size_t count) {
    return in_stream(nullptr, [&](Lock& lock, Stream& stream) {
        if (const CUresult error = refuse_in_capture("cuMemsetD32_v2"); error != CUDA_SUCCESS) return error;
        return fill(lock, stream, "cuMemsetD32_v2", target, value, count);
    });
}
