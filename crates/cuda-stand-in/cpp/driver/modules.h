// Modules and their functions: whatever image is loaded, the kernels are those that are linked into the stand-in.
#pragma once
#include <registry.h>

#include "driver.h"

namespace stand_in {

// Shared memory of a block: what every launch may have, and what cuFuncSetAttribute can allow (sm_90).
inline constexpr int DEFAULT_SHARED_BYTES = 48 << 10;
inline constexpr int MAX_SHARED_BYTES = 227 << 10;

struct Module {
    std::shared_ptr<Context> context;
};

struct Function {
    std::shared_ptr<Context> context;
    std::shared_ptr<Module> module;
    std::string name;
    const cuda_cpu::Kernel* kernel;
    size_t max_dynamic_shared_bytes = DEFAULT_SHARED_BYTES;
};

}  // namespace stand_in
