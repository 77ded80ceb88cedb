#include "memory.h"

#include "captures.h"
#include "reports.h"
#include "streams.h"

namespace stand_in {

Device* device_of(uintptr_t address) {
    for (const auto& device : driver().devices) {
        if (device->memory.contains(address)) return device.get();
    }
    return nullptr;
}

namespace {

// The live allocation that holds a range, null if there is none.
const Allocation* holder(const Arena& arena, uintptr_t address, size_t num_bytes) {
    const Allocation* found = arena.find(address);
    if (found == nullptr || found->is_freed || address < found->begin) return nullptr;
    const size_t offset = address - found->begin;
    return offset <= found->size && num_bytes <= found->size - offset ? found : nullptr;
}

bool is_registered(uintptr_t address, size_t num_bytes) {
    auto next = driver().registered.upper_bound(address);
    if (next == driver().registered.begin()) return false;
    const auto& [begin, size] = *std::prev(next);
    return address - begin <= size && num_bytes <= size - (address - begin);
}

size_t counted(size_t size) { return (size + Arena::ALIGNMENT - 1) / Arena::ALIGNMENT * Arena::ALIGNMENT; }

}  // namespace

bool is_pinned(uintptr_t address, size_t num_bytes) {
    return holder(*driver().host_memory, address, num_bytes) != nullptr || is_registered(address, num_bytes);
}

CUresult check_range(const char* function, CUdeviceptr address, size_t num_bytes) {
    const Device* device = device_of(address);
    if (device == nullptr) {
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: %#llx is no address of device memory", function, address);
    }
    if (holder(device->memory, address, num_bytes) == nullptr) {
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: %zu bytes from %s are not all allocated", function, num_bytes,
                      device->memory.describe(address).c_str());
    }
    return CUDA_SUCCESS;
}

void* resolve(uintptr_t address, size_t num_bytes) {
    Lock lock(driver().mutex);
    const char* operation = this_thread().running;
    const Device* device = device_of(address);
    if (device == nullptr) {
        if (!is_pinned(address, num_bytes)) {
            die("%s: %zu bytes from %s are no longer pinned", operation, num_bytes,
                driver().host_memory->describe(address).c_str());
        }
        return reinterpret_cast<void*>(address);
    }
    const Allocation* allocation = holder(device->memory, address, num_bytes);
    if (allocation == nullptr) {
        die("%s: %zu bytes from %s are no longer allocated", operation, num_bytes,
            device->memory.describe(address).c_str());
    }
    if (!allocation->is_ready) {
        die("%s runs before the allocation in stream order of %s", operation, allocation->name().c_str());
    }
    return reinterpret_cast<void*>(device->memory.inner(address));
}

uintptr_t resolve_argument(const Context& context, uintptr_t address, const char* kernel, size_t argument) {
    const Device* device = device_of(address);
    if (device == nullptr) return address;
    if (device != &context.device && !context.peers.contains(device->ordinal)) {
        die("%s: argument %zu is in memory of device %d, which device %d cannot reach", kernel, argument,
            device->ordinal, context.device.ordinal);
    }
    const Allocation* allocation = holder(device->memory, address, 0);
    if (allocation == nullptr) {
        die("%s: argument %zu points to %s", kernel, argument, device->memory.describe(address).c_str());
    }
    if (!allocation->is_ready) {
        die("%s runs before the allocation in stream order of its argument %zu", kernel, argument);
    }
    return device->memory.inner(address);
}

void check_pointer(uintptr_t address, const char* kernel, size_t argument) {
    if (address == 0 || device_of(address) != nullptr || is_pinned(address, 0)) return;
    die("%s: argument %zu, %#zx, is neither device memory nor pinned: %s", kernel, argument, address,
        driver().host_memory->describe(address).c_str());
}

namespace {

CUresult allocate(Lock& lock, Context& context, size_t size, bool is_ready, CUdeviceptr* address) {
    Device& device = context.device;
    if (driver().options.fail_allocation.strikes()) {
        return refuse(CUDA_ERROR_OUT_OF_MEMORY, "an allocation of %zu bytes fails on purpose", size);
    }
    // What streams are about to free counts as free, as in the real driver.
    if (counted(size) > device.total_bytes - device.used_bytes) finish(lock, context);
    if (counted(size) > device.total_bytes - device.used_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    Allocation* allocation = device.memory.allocate(size);
    if (allocation == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    allocation->is_ready = is_ready;
    device.used_bytes += counted(size);
    *address = allocation->begin;
    return CUDA_SUCCESS;
}

CUresult release(const char* function, CUdeviceptr address) {
    Device* device = device_of(address);
    const Allocation* allocation = device == nullptr ? nullptr : device->memory.find_live(address);
    if (allocation == nullptr) {
        const Arena& arena = device == nullptr ? *driver().host_memory : device->memory;
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: %#llx, %s, is not the beginning of a live allocation", function,
                      address, arena.describe(address).c_str());
    }
    device->used_bytes -= counted(allocation->size);
    device->memory.free(address);
    return CUDA_SUCCESS;
}

}  // namespace

void free_all(Device& device) {
    std::vector<uintptr_t> live;
    for (const auto& [first_page, allocation] : device.memory.allocations()) {
        if (!allocation.is_freed) live.push_back(allocation.begin);
    }
    for (const uintptr_t begin : live) device.memory.free(begin);
    device.used_bytes = 0;
}

void report_leaks(const Arena& arena) {
    for (const auto& [first_page, allocation] : arena.allocations()) {
        if (allocation.is_freed) continue;
        ++driver().num_leaks;
        note("%s in %s was never freed", allocation.name().c_str(), arena.name());
    }
}

}  // namespace stand_in

using namespace stand_in;

API CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
    return in_context([&](Lock&, Context& context) {
        *total_bytes = context.device.total_bytes;
        *free_bytes = context.device.total_bytes - context.device.used_bytes;
        return CUDA_SUCCESS;
    });
}

API CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t size) {
    return in_context([&](Lock& lock, Context& context) {
        if (const CUresult error = refuse_in_capture("cuMemAlloc_v2"); error != CUDA_SUCCESS) return error;
        if (size == 0) return CUDA_ERROR_INVALID_VALUE;
        return allocate(lock, context, size, true, address);
    });
}

// Work that still uses the memory must be done: it is gone at once.
API CUresult cuMemFree_v2(CUdeviceptr address) {
    return in_context([&](Lock&, Context&) {
        if (const CUresult error = refuse_in_capture("cuMemFree_v2"); error != CUDA_SUCCESS) return error;
        return address == 0 ? CUDA_SUCCESS : release("cuMemFree_v2", address);
    });
}

// The address is known at once, but only what runs after the allocation in stream order may use it.
API CUresult cuMemAllocAsync(CUdeviceptr* address, size_t size, CUstream handle) {
    return in_stream(handle, [&](Lock& lock, Stream& stream) {
        if (stream.capture != nullptr) return refuse_capturing(stream, "cuMemAllocAsync");
        Context& context = *stream.context;
        if (const CUresult error = allocate(lock, context, size, false, address); error != CUDA_SUCCESS) return error;
        const CUdeviceptr begin = *address;
        Device& device = context.device;
        return enqueue(lock, stream, {Work::Kind::Memory, "an allocation", [begin, &device] {
                                          Lock inner(driver().mutex);
                                          Allocation* allocation = device.memory.find_live(begin);
                                          if (allocation != nullptr) allocation->is_ready = true;
                                      }});
    });
}

API CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
    return in_stream(handle, [&](Lock& lock, Stream& stream) {
        if (stream.capture != nullptr) return refuse_capturing(stream, "cuMemFreeAsync");
        Device* device = device_of(address);
        if (device == nullptr || device->memory.find_live(address) == nullptr) {
            return refuse(CUDA_ERROR_INVALID_VALUE, "cuMemFreeAsync: %#llx is not the beginning of a live allocation",
                          address);
        }
        return enqueue(lock, stream, {Work::Kind::Memory, "freeing memory", [address] {
                                          Lock inner(driver().mutex);
                                          if (release("cuMemFreeAsync", address) != CUDA_SUCCESS)
                                              die("memory freed twice");
                                      }});
    });
}

API CUresult cuMemHostAlloc(void** address, size_t size, unsigned) {
    return in_context([&](Lock&, Context&) {
        if (const CUresult error = refuse_in_capture("cuMemHostAlloc"); error != CUDA_SUCCESS) return error;
        if (size == 0) return CUDA_ERROR_INVALID_VALUE;
        if (driver().options.fail_host_allocation.strikes()) {
            return refuse(CUDA_ERROR_OUT_OF_MEMORY, "an allocation of %zu bytes of pinned memory fails on purpose",
                          size);
        }
        const Allocation* allocation = driver().host_memory->allocate(size);
        if (allocation == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
        *address = reinterpret_cast<void*>(allocation->begin);
        return CUDA_SUCCESS;
    });
}

API CUresult cuMemAllocHost_v2(void** address, size_t size) { return cuMemHostAlloc(address, size, 0); }

API CUresult cuMemFreeHost(void* address) {
    return in_context([&](Lock&, Context&) {
        if (const CUresult error = refuse_in_capture("cuMemFreeHost"); error != CUDA_SUCCESS) return error;
        const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
        if (driver().host_memory->free(begin)) return CUDA_SUCCESS;
        return refuse(CUDA_ERROR_INVALID_VALUE, "cuMemFreeHost: %p, %s, is not the beginning of a live allocation",
                      address, driver().host_memory->describe(begin).c_str());
    });
}

API CUresult cuMemHostRegister_v2(void* address, size_t size, unsigned) {
    return in_context([&](Lock&, Context&) {
        if (const CUresult error = refuse_in_capture("cuMemHostRegister_v2"); error != CUDA_SUCCESS) return error;
        const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
        if (begin == 0 || size == 0) return CUDA_ERROR_INVALID_VALUE;
        if (is_pinned(begin, 1)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
        driver().registered[begin] = size;
        return CUDA_SUCCESS;
    });
}

API CUresult cuMemHostUnregister(void* address) {
    return in_context([&](Lock&, Context&) {
        if (const CUresult error = refuse_in_capture("cuMemHostUnregister"); error != CUDA_SUCCESS) return error;
        const size_t num_removed = driver().registered.erase(reinterpret_cast<uintptr_t>(address));
        return num_removed == 0 ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : CUDA_SUCCESS;
    });
}

// Pinned memory has one address for hosts and devices.
API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device_address, void* address, unsigned) {
    return in_context([&](Lock&, Context&) {
        if (!is_pinned(reinterpret_cast<uintptr_t>(address), 1)) return CUDA_ERROR_INVALID_VALUE;
        *device_address = reinterpret_cast<CUdeviceptr>(address);
        return CUDA_SUCCESS;
    });
}

// Allocations in stream order come from one pool a device, which gives back at once what is freed: it has nothing to
// tune.
API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice ordinal) {
    return with_device(ordinal, [&](Lock&, Device&) {
        *pool = reinterpret_cast<CUmemoryPool>(static_cast<uintptr_t>(ordinal) + 1);
        return CUDA_SUCCESS;
    });
}

API CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int, void*) {
    return with_device(static_cast<CUdevice>(reinterpret_cast<uintptr_t>(pool)) - 1,
                       [](Lock&, Device&) { return CUDA_SUCCESS; });
}

API CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t) {
    return with_device(static_cast<CUdevice>(reinterpret_cast<uintptr_t>(pool)) - 1,
                       [](Lock&, Device&) { return CUDA_SUCCESS; });
}
