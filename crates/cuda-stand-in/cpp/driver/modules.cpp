#include "modules.h"

#include <algorithm>

#include "captures.h"
#include "reports.h"

namespace stand_in {
namespace {

int attribute(const Function& function, int number) {
    switch (number) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return static_cast<int>(function.kernel->max_threads);
        case CU_FUNC_ATTRIBUTE_NUM_REGS: return 32;
        case CU_FUNC_ATTRIBUTE_PTX_VERSION:
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
            return driver().options.capability_of(function.module->context->device.ordinal);
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            return static_cast<int>(function.max_dynamic_shared_bytes);
        default: return 0;
    }
}

// Of which each multiprocessor of the H200 has 64 warps, 32 blocks and 228 KiB, 1 KiB of it taken for each block.
int blocks_of_multiprocessor(int block_threads, size_t dynamic_bytes) {
    const int num_warps = (block_threads + 31) / 32;
    const int by_memory = static_cast<int>((size_t{228} << 10) / (dynamic_bytes + 1024));
    return std::min({32, 64 / num_warps, by_memory});
}

}  // namespace
}  // namespace stand_in

using namespace stand_in;

API CUresult cuModuleLoadData(CUmodule* handle, const void* image) {
    return in_context([&](Lock&, Context& context) {
        if (const CUresult error = refuse_in_capture("cuModuleLoadData"); error != CUDA_SUCCESS) return error;
        if (image == nullptr) return CUDA_ERROR_INVALID_VALUE;
        if (driver().options.module_error != CUDA_SUCCESS) {
            const auto error = static_cast<CUresult>(driver().options.module_error);
            return refuse(error, "loading a module fails on purpose");
        }
        *handle = driver().modules.insert(std::make_shared<Module>(Module{context.device.primary}));
        return CUDA_SUCCESS;
    });
}

API CUresult cuModuleLoadDataEx(CUmodule* handle, const void* image, unsigned, int*, void**) {
    return cuModuleLoadData(handle, image);
}

API CUresult cuModuleUnload(CUmodule handle) {
    return in_context([&](Lock&, Context&) {
        if (const CUresult error = refuse_in_capture("cuModuleUnload"); error != CUDA_SUCCESS) return error;
        const auto module = driver().modules.remove(handle);
        if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
        std::vector<uintptr_t> ended;
        for (const auto& [number, function] : driver().functions.all()) {
            if (function->module == module) ended.push_back(number);
        }
        for (const uintptr_t number : ended) driver().functions.remove(reinterpret_cast<CUfunction>(number));
        return CUDA_SUCCESS;
    });
}

API CUresult cuModuleGetFunction(CUfunction* handle, CUmodule module_handle, const char* name) {
    return in_context([&](Lock&, Context& context) {
        const auto module = driver().modules.find(module_handle);
        if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
        const auto found = cuda_cpu::kernels().find(name);
        if (found == cuda_cpu::kernels().end()) {
            return refuse(CUDA_ERROR_NOT_FOUND, "there is no kernel '%s' among those that were compiled for the CPU",
                          name);
        }
        *handle = driver().functions.insert(
            std::make_shared<Function>(Function{context.device.primary, module, name, &found->second}));
        return CUDA_SUCCESS;
    });
}

API CUresult cuModuleGetGlobal_v2(CUdeviceptr*, size_t*, CUmodule, const char*) {
    return in_context([](Lock&, Context&) { return CUDA_ERROR_NOT_FOUND; });
}

API CUresult cuFuncGetAttribute(int* value, int number, CUfunction handle) {
    return in_context([&](Lock&, Context&) {
        const auto function = driver().functions.find(handle);
        if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
        *value = attribute(*function, number);
        return CUDA_SUCCESS;
    });
}

API CUresult cuFuncSetAttribute(CUfunction handle, int number, int value) {
    return in_context([&](Lock&, Context&) {
        const auto function = driver().functions.find(handle);
        if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
        if (number == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) return CUDA_SUCCESS;
        if (number != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
        if (value < 0 || value > MAX_SHARED_BYTES) {
            return refuse(CUDA_ERROR_INVALID_VALUE, "%s: blocks cannot have %d bytes of shared memory",
                          function->name.c_str(), value);
        }
        function->max_dynamic_shared_bytes = static_cast<size_t>(value);
        return CUDA_SUCCESS;
    });
}

API CUresult cuFuncSetCacheConfig(CUfunction handle, int) {
    return in_context([&](Lock&, Context&) {
        return driver().functions.find(handle) == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
    });
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* num_blocks, CUfunction handle, int block_threads,
                                                                  size_t dynamic_bytes, unsigned) {
    return in_context([&](Lock&, Context&) {
        if (driver().functions.find(handle) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
        if (block_threads <= 0) return CUDA_ERROR_INVALID_VALUE;
        *num_blocks = blocks_of_multiprocessor(block_threads, dynamic_bytes);
        return CUDA_SUCCESS;
    });
}

// The largest block that the kernel permits; a block's dynamic shared memory may depend on its size.
API CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int* num_blocks, int* block_threads, CUfunction handle,
                                                       size_t (*dynamic_bytes_of)(int), size_t dynamic_bytes,
                                                       int max_block_threads, unsigned) {
    return in_context([&](Lock&, Context&) {
        const auto function = driver().functions.find(handle);
        if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
        const int bound = function->kernel->max_threads == 0 ? 1024 : static_cast<int>(function->kernel->max_threads);
        *block_threads = max_block_threads > 0 ? std::min(max_block_threads, bound) : bound;
        if (dynamic_bytes_of != nullptr) dynamic_bytes = dynamic_bytes_of(*block_threads);
        *num_blocks = 132 * blocks_of_multiprocessor(*block_threads, dynamic_bytes);
        return CUDA_SUCCESS;
    });
}

API CUresult cuOccupancyMaxPotentialBlockSize(int* num_blocks, int* block_threads, CUfunction handle,
                                              size_t (*dynamic_bytes_of)(int), size_t dynamic_bytes,
                                              int max_block_threads) {
    return cuOccupancyMaxPotentialBlockSizeWithFlags(num_blocks, block_threads, handle, dynamic_bytes_of, dynamic_bytes,
                                                     max_block_threads, 0);
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* num_blocks, CUfunction handle, int block_threads,
                                                         size_t dynamic_bytes) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(num_blocks, handle, block_threads, dynamic_bytes, 0);
}
