// Device memory and pinned host memory, and what operations may touch.
#pragma once
#include "driver.h"

namespace stand_in {

// The device whose memory an address belongs to, null for host memory.
Device* device_of(uintptr_t address);

// Whether [address, address + num_bytes) is host memory that is pinned.
bool is_pinned(uintptr_t address, size_t num_bytes);

// Whether a device range lies in one live allocation. Complains and returns CUDA_ERROR_INVALID_VALUE otherwise.
CUresult check_range(const char* function, CUdeviceptr address, size_t num_bytes);

// Where an operation that runs now finds its operand: the inner address of device memory, and pinned host memory as it
// is. Ends the process if the memory has been freed since the operation was enqueued, or is not ready in stream order.
void* resolve(uintptr_t address, size_t num_bytes);

// The same for a pointer among the arguments of a kernel, of which only the beginning is known. It may stand at the end
// of an allocation, where arrays without elements are.
uintptr_t resolve_argument(const Context& context, uintptr_t address, const char* kernel, size_t argument);

// Ends the process if a pointer among the arguments of a kernel is one that no device can follow.
void check_pointer(uintptr_t address, const char* kernel, size_t argument);

// Frees everything on a device whose context ends.
void free_all(Device& device);

// Lists and counts what nobody has freed.
void report_leaks(const Arena& arena);

// Names faults at addresses of device memory.
void install_fault_handler();

}  // namespace stand_in
