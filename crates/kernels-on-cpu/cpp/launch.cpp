#include "launch.h"

#include <stdio.h>

#include "registry.h"

namespace cuda_cpu {

namespace {

// What every GPU from sm_80 on accepts.
constexpr unsigned MAX_BLOCK_THREADS = 1024;
constexpr unsigned MAX_GRID_X = 0x7fffffff;
constexpr unsigned MAX_GRID_YZ = 65535;

void check(bool is_fine, const std::string& what) {
    if (!is_fine) throw LaunchError(what);
}

std::string text(Dims dims) {
    return std::to_string(dims.x) + " x " + std::to_string(dims.y) + " x " + std::to_string(dims.z);
}

void run_checked(const CudaCpuLaunch& call) {
    const auto found = kernels().find(call.name);
    check(found != kernels().end(), std::string("there is no kernel '") + call.name + "'");
    const Kernel& kernel = found->second;
    check(call.num_args == kernel.arg_bytes.size(), "the kernel has " + std::to_string(kernel.arg_bytes.size()) +
                                                        " arguments, not " + std::to_string(call.num_args));
    for (size_t i = 0; i < call.num_args; ++i) {
        check(call.arg_bytes[i] == kernel.arg_bytes[i],
              "argument " + std::to_string(i) + " has " + std::to_string(kernel.arg_bytes[i]) + " bytes, not " +
                  std::to_string(call.arg_bytes[i]));
    }
    const auto dims = [](const uint32_t (&xyz)[3]) { return Dims{xyz[0], xyz[1], xyz[2]}; };
    launch_kernel(kernel, {dims(call.grid), dims(call.block), call.shared_bytes, call.seed}, call.args);
}

}  // namespace

void launch_kernel(const Kernel& kernel, const Launch& launch, void* const* args) {
    const Dims grid = launch.grid, block = launch.block;
    check(grid.count() > 0 && grid.x <= MAX_GRID_X && grid.y <= MAX_GRID_YZ && grid.z <= MAX_GRID_YZ,
          "a grid of " + text(grid) + " blocks");
    check(block.count() > 0 && block.count() <= MAX_BLOCK_THREADS && block.count() % 32 == 0,
          "blocks of " + text(block) + " threads");
    check(block.count() <= kernel.max_threads,
          "blocks of " + text(block) + " threads, above the kernel's bound of " + std::to_string(kernel.max_threads));
    check(launch.shared_bytes <= MAX_SHARED_BYTES, std::to_string(launch.shared_bytes) + " bytes of shared memory");
    kernel.run(launch, args);
}

}  // namespace cuda_cpu

bool cuda_cpu_launch(const CudaCpuLaunch* launch, char* error, size_t error_bytes) {
    try {
        cuda_cpu::run_checked(*launch);
        return true;
    } catch (const std::exception& problem) {
        snprintf(error, error_bytes, "%s: %s", launch->name, problem.what());
        return false;
    }
}

const char* cuda_cpu_kernel_names() {
    static const std::string names = [] {
        std::string names;
        for (const auto& [name, kernel] : cuda_cpu::kernels()) names += name + "\n";
        return names;
    }();
    return names.c_str();
}
