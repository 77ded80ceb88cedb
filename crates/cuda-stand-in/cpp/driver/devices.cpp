// Devices and their primary contexts.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string_view>

#include "captures.h"
#include "events.h"
#include "memory.h"
#include "modules.h"
#include "reports.h"
#include "streams.h"

namespace stand_in {
namespace {

constexpr size_t GIB = size_t{1} << 30;

// Many times what can be allocated, so that addresses are rarely used again.
size_t address_bytes(size_t memory_bytes) { return std::max(64 * GIB, 8 * memory_bytes); }

constexpr size_t HOST_ADDRESS_BYTES = 256 * GIB;

struct Attribute {
    int number;
    int value;
};

// Values of the H200, by the numbers of CUdevice_attribute; all others are 0.
// https://docs.nvidia.com/cuda/cuda-c-programming-guide, "Technical Specifications per Compute Capability", 9.0
constexpr Attribute ATTRIBUTES[] = {
    {1, 1024},        // threads of a block
    {2, 1024},        // in x
    {3, 1024},        // in y
    {4, 64},          // in z
    {5, 2147483647},  // blocks of a grid in x
    {6, 65535},       // in y
    {7, 65535},       // in z
    {8, DEFAULT_SHARED_BYTES},
    {9, 64 << 10},    // bytes of constant memory
    {10, 32},         // threads of a warp
    {12, 65536},      // registers of a block
    {13, 1980000},    // clock in kHz
    {15, 1},          // copies run beside kernels
    {16, 132},        // multiprocessors
    {19, 1},          // host memory can be mapped
    {31, 1},          // kernels run beside each other
    {36, 3201000},    // clock of the memory in kHz
    {37, 6144},       // bits of the memory bus
    {38, 50 << 20},   // bytes of second-level cache
    {39, 2048},       // threads of a multiprocessor
    {40, 3},          // copy engines
    {41, 1},          // one address space for host and devices
    {78, 1},          // streams have priorities
    {79, 1},          // first-level cache of global memory
    {80, 1},          // and of local memory
    {81, 228 << 10},  // bytes of shared memory of a multiprocessor
    {82, 65536},      // its registers
    {90, 1},          // kernels can be preempted
    {91, 1},          // registered host memory has one address
    {97, MAX_SHARED_BYTES},
    {99, 1},      // host memory can be registered
    {106, 32},    // blocks of a multiprocessor
    {111, 1024},  // bytes of shared memory that the system takes of each block
    {115, 1},     // memory pools: allocations in stream order
};

int attribute(const Device& device, int number) {
    const int capability = driver().options.capability_of(device.ordinal);
    if (number == 33) return device.ordinal + 1;  // the PCI bus
    if (number == 75) return capability / 10;
    if (number == 76) return capability % 10;
    const auto found = std::find_if(std::begin(ATTRIBUTES), std::end(ATTRIBUTES),
                                    [&](const Attribute& attribute) { return attribute.number == number; });
    return found == std::end(ATTRIBUTES) ? 0 : found->value;
}

void create_context(Device& device) {
    const auto context = std::make_shared<Context>(device);
    context->handle = driver().contexts.insert(context);
    add_default_streams(context);
    device.primary = context;
}

// Ends a context and all that is in it. Work that has not run is done first, as a program that ends in order expects.
void end_context(Lock& lock, Device& device) {
    const auto context = device.primary;
    for (const auto& stream : context->streams) {
        if (stream->capture != nullptr) leave_capture(*stream);
    }
    finish(lock, *context);
    if (driver().options.report_leaks != 0) report_leaks(device.memory);
    free_all(device);
    const auto end_all = [&](auto& handles) {
        std::vector<uintptr_t> ended;
        for (const auto& [number, object] : handles.all()) {
            if (object->context == context) ended.push_back(number);
        }
        for (const uintptr_t number : ended) {
            handles.remove(reinterpret_cast<std::remove_cvref_t<decltype(handles)>::Name>(number));
        }
    };
    end_all(driver().streams);
    end_all(driver().events);
    end_all(driver().graphs);
    end_all(driver().graph_execs);
    end_all(driver().modules);
    end_all(driver().functions);
    driver().contexts.remove(context->handle);
    context->streams.clear();
    context->legacy = nullptr;
    device.primary = nullptr;
}

}  // namespace

Device::Device(int ordinal, size_t num_bytes)
    : ordinal(ordinal),
      total_bytes(num_bytes),
      name("memory of device " + std::to_string(ordinal)),
      memory(Arena::Kind::Device, name.c_str(), address_bytes(num_bytes)) {}

Driver& driver() {
    static Driver* driver = new Driver;
    return *driver;
}

ThreadState& this_thread() {
    static thread_local ThreadState state;
    return state;
}

}  // namespace stand_in

using namespace stand_in;

API CUresult cuInit(unsigned flags) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    Lock lock(driver().mutex);
    Driver& the = driver();
    if (the.is_initialized) return CUDA_SUCCESS;
    the.options.read_environment();
    if (the.options.init_error != CUDA_SUCCESS) return static_cast<CUresult>(the.options.init_error);
    if (the.options.num_devices == 0) return CUDA_ERROR_NO_DEVICE;
    the.random.seed(the.options.seed);
    for (int ordinal = 0; ordinal < static_cast<int>(std::min<uint64_t>(the.options.num_devices, 64)); ++ordinal) {
        the.devices.push_back(std::make_unique<Device>(ordinal, the.options.memory_of(ordinal)));
    }
    the.host_memory = std::make_unique<Arena>(Arena::Kind::Host, "pinned host memory", HOST_ADDRESS_BYTES);
    install_fault_handler();
    if (the.options.run_after_ms != 0) start_background(the.options.run_after_ms);
    the.is_initialized = true;
    return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int* version) {
    Lock lock(driver().mutex);
    if (!driver().is_initialized) driver().options.read_environment();
    *version = static_cast<int>(driver().options.driver_version);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int* count) {
    return with_driver([&](Lock&) {
        *count = static_cast<int>(driver().devices.size());
        return CUDA_SUCCESS;
    });
}

API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    return with_device(ordinal, [&](Lock&, Device&) {
        *device = ordinal;
        return CUDA_SUCCESS;
    });
}

API CUresult cuDeviceGetName(char* name, int max_len, CUdevice ordinal) {
    return with_device(ordinal, [&](Lock&, Device&) {
        if (name == nullptr || max_len <= 0) return CUDA_ERROR_INVALID_VALUE;
        std::snprintf(name, static_cast<size_t>(max_len), "stand-in for a GPU, on the CPU");
        return CUDA_SUCCESS;
    });
}

API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice ordinal) {
    return with_device(ordinal, [&](Lock&, Device&) {
        // Hosts have devices of their own.
        char host[256] = "";
        gethostname(host, sizeof host - 1);
        const uint64_t hash = std::hash<std::string_view>{}(host);
        std::memcpy(uuid->bytes, "standin", 7);
        std::memcpy(uuid->bytes + 7, &hash, sizeof hash);
        uuid->bytes[15] = static_cast<char>(ordinal);
        return CUDA_SUCCESS;
    });
}

API CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice ordinal) { return cuDeviceGetUuid_v2(uuid, ordinal); }

API CUresult cuDeviceGetPCIBusId(char* text, int max_len, CUdevice ordinal) {
    return with_device(ordinal, [&](Lock&, Device&) {
        if (text == nullptr || max_len < 13) return CUDA_ERROR_INVALID_VALUE;
        std::snprintf(text, static_cast<size_t>(max_len), "0000:%02x:00.0", static_cast<unsigned>(ordinal + 1) & 0xff);
        return CUDA_SUCCESS;
    });
}

API CUresult cuDeviceTotalMem_v2(size_t* num_bytes, CUdevice ordinal) {
    return with_device(ordinal, [&](Lock&, Device& device) {
        *num_bytes = device.total_bytes;
        return CUDA_SUCCESS;
    });
}

API CUresult cuDeviceGetAttribute(int* value, int number, CUdevice ordinal) {
    return with_device(ordinal, [&](Lock&, Device& device) {
        *value = attribute(device, number);
        return CUDA_SUCCESS;
    });
}

API CUresult cuDeviceCanAccessPeer(int* can_access, CUdevice ordinal, CUdevice peer) {
    return with_device(ordinal, [&](Lock&, Device&) {
        if (peer < 0 || static_cast<size_t>(peer) >= driver().devices.size()) return CUDA_ERROR_INVALID_DEVICE;
        *can_access = ordinal != peer;
        return CUDA_SUCCESS;
    });
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext* handle, CUdevice ordinal) {
    return with_device(ordinal, [&](Lock&, Device& device) {
        if (device.num_retained++ == 0) create_context(device);
        *handle = device.primary->handle;
        return CUDA_SUCCESS;
    });
}

// The last release ends the context; a new one has a working device again.
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
    return with_device(ordinal, [&](Lock& lock, Device& device) {
        if (device.num_retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
        if (--device.num_retained == 0) end_context(lock, device);
        return CUDA_SUCCESS;
    });
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned* flags, int* is_active) {
    return with_device(ordinal, [&](Lock&, Device& device) {
        *flags = 0;
        *is_active = device.primary != nullptr;
        return CUDA_SUCCESS;
    });
}

API CUresult cuCtxSetCurrent(CUcontext handle) {
    return with_driver([&](Lock&) {
        if (handle != nullptr && driver().contexts.find(handle) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
        this_thread().current = handle;
        return CUDA_SUCCESS;
    });
}

API CUresult cuCtxGetCurrent(CUcontext* handle) {
    return with_driver([&](Lock&) {
        *handle = driver().contexts.find(this_thread().current) == nullptr ? nullptr : this_thread().current;
        return CUDA_SUCCESS;
    });
}

API CUresult cuCtxGetDevice(CUdevice* ordinal) {
    return with_driver([&](Lock&) {
        const auto context = driver().contexts.find(this_thread().current);
        if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
        *ordinal = context->device.ordinal;
        return CUDA_SUCCESS;
    });
}

API CUresult cuCtxSynchronize() {
    return in_context([&](Lock& lock, Context& context) {
        for (const auto& stream : context.streams) {
            if (stream->capture != nullptr) return refuse_capturing(*stream, "cuCtxSynchronize");
        }
        if (const CUresult error = refuse_in_capture("cuCtxSynchronize"); error != CUDA_SUCCESS) return error;
        finish(lock, context);
        return CUDA_SUCCESS;
    });
}

API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    return in_context([&](Lock&, Context&) {
        if (least != nullptr) *least = 0;
        if (greatest != nullptr) *greatest = -5;
        return CUDA_SUCCESS;
    });
}

// How a thread waits, caches, and limits of the device's own runtime change nothing here.
API CUresult cuCtxSetFlags(unsigned) {
    return in_context([](Lock&, Context&) { return CUDA_SUCCESS; });
}

API CUresult cuCtxSetCacheConfig(int) {
    return in_context([](Lock&, Context&) { return CUDA_SUCCESS; });
}

API CUresult cuCtxSetLimit(int, size_t) {
    return in_context([](Lock&, Context&) { return CUDA_SUCCESS; });
}

API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned) {
    return in_context([&](Lock&, Context& context) {
        const auto other = driver().contexts.find(peer);
        if (other == nullptr || other.get() == &context) return CUDA_ERROR_INVALID_CONTEXT;
        const bool is_new = context.peers.insert(other->device.ordinal).second;
        return is_new ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    });
}

namespace {

// Contexts that nobody released count too.
[[gnu::destructor]] void report_at_exit() {
    Lock lock(driver().mutex, std::try_to_lock);
    if (!lock.owns_lock() || !driver().is_initialized || driver().options.report_leaks == 0) return;
    for (const auto& device : driver().devices) report_leaks(device->memory);
    report_leaks(*driver().host_memory);
    note("%zu allocations were never freed", driver().num_leaks);
}

}  // namespace
