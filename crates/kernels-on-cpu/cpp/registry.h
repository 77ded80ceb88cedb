// The kernels that are linked in, by name.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "machine.h"

namespace cuda_cpu {

struct Kernel {
    // Its bound on the threads of a block.
    unsigned max_threads;
    // Bytes of each argument.
    std::vector<size_t> arg_bytes;
    // Whether it is a pointer.
    std::vector<bool> is_arg_pointer;
    // Runs it with arguments given by address, as cuLaunchKernel takes them.
    std::function<void(const Launch&, void* const*)> run;
};

inline std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> kernels;
    return kernels;
}

template <class... Args>
bool add_kernel(const char* name, void (*kernel)(Args...), unsigned max_threads) {
    const auto run_it = [kernel](const Launch& launch, void* const* args) {
        [&]<size_t... I>(std::index_sequence<I...>) {
            const std::tuple<Args...> values{*static_cast<Args*>(args[I])...};
            run(launch, [&] { std::apply(kernel, values); });
        }(std::index_sequence_for<Args...>{});
    };
    return kernels().insert({name, Kernel{max_threads, {sizeof(Args)...}, {std::is_pointer_v<Args>...}, run_it}}).second;
}

// Checks a launch as the driver does, and runs it. Throws LaunchError.
void launch_kernel(const Kernel& kernel, const Launch& launch, void* const* args);

}  // namespace cuda_cpu
