// The C function that src/lib.rs calls.
#pragma once

#include <stddef.h>
#include <stdint.h>

struct CudaCpuLaunch {
    const char* name;
    uint32_t grid[3], block[3];
    size_t shared_bytes;
    uint64_t seed;
    // The address and the size of each argument.
    void* const* args;
    const size_t* arg_bytes;
    size_t num_args;
};

// Runs a kernel to its end. Returns whether it ran without an error; if not, writes which to `error`, a C string.
extern "C" bool cuda_cpu_launch(const CudaCpuLaunch* launch, char* error, size_t error_bytes);

// The names of all kernels, one a line.
extern "C" const char* cuda_cpu_kernel_names();
