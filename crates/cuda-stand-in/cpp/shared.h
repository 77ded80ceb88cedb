// What the stand-in for libcuda.so.1 offers to stand-ins for other libraries of NVIDIA, beside its API.
#pragma once
#include "api.h"

// A range of memory that work reads or writes.
struct CuStandInOperand {
    CUdeviceptr address;
    size_t num_bytes;
};

// Appends work to a stream. When it runs, it gets its state and the addresses at which it finds its operands; if it
// returns false, it waits for another device and is run again. Then drop is called, or when the graph that captured it
// ends. CUDA_ERROR_INVALID_VALUE if an operand is not all allocated device memory; drop is called then too.
extern "C" CUresult cuStandInEnqueue(CUstream stream, const char* name, const CuStandInOperand* operands,
                                     size_t num_operands, bool (*run)(void* state, void* const* addresses),
                                     void (*drop)(void* state), void* state);

// Counts an event of a fault; true if it is the one that must fail.
extern "C" bool cuStandInStrikes(const char* fault);
