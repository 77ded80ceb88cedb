// Launches of kernels, which run as C++ that was compiled from the same sources (crates/kernels-on-cpu).
#include <cstring>
#include <sstream>

#include "captures.h"
#include "memory.h"
#include "modules.h"
#include "reports.h"
#include "streams.h"

namespace stand_in {
namespace {

// The arguments of a launch, copied when it is made, as the driver does.
class Arguments {
public:
    Arguments(const Function& function, void* const* values) {
        for (size_t i = 0; i < function.kernel->arg_bytes.size(); ++i) {
            const size_t num_bytes = function.kernel->arg_bytes[i];
            std::vector<uint64_t> words((num_bytes + 7) / 8);
            std::memcpy(words.data(), values[i], num_bytes);
            arguments_.push_back(std::move(words));
            num_bytes_.push_back(num_bytes);
        }
        is_pointer_ = function.kernel->is_arg_pointer;
    }

    // With inner addresses in place of those of device memory: every whole word of an argument that is an address of a
    // device is taken for a pointer, so that pointers in structs are found too. Ones in device memory are not.
    std::vector<std::vector<uint64_t>> resolved(const Context& context, const std::string& kernel) const {
        Lock lock(driver().mutex);
        auto arguments = arguments_;
        for (size_t i = 0; i < arguments.size(); ++i) {
            if (is_pointer_[i]) check_pointer(arguments[i][0], kernel.c_str(), i);
            for (size_t word = 0; word < num_bytes_[i] / 8; ++word) {
                arguments[i][word] = resolve_argument(context, arguments[i][word], kernel.c_str(), i);
            }
        }
        return arguments;
    }

    // In hexadecimal, with spaces between arguments and commas between the words of one.
    std::string text() const {
        std::ostringstream out;
        out << std::hex;
        for (const auto& words : arguments_) {
            for (size_t i = 0; i < words.size(); ++i) out << (i == 0 ? ' ' : ',') << words[i];
        }
        return out.str();
    }

private:
    std::vector<std::vector<uint64_t>> arguments_;  // in words, so that they are aligned
    std::vector<size_t> num_bytes_;
    std::vector<bool> is_pointer_;
};

void run_kernel(const Context& context, const Function& function, const cuda_cpu::Launch& launch,
                const Arguments& arguments) {
    auto values = arguments.resolved(context, function.name);
    std::vector<void*> addresses;
    for (auto& value : values) addresses.push_back(value.data());
    try {
        cuda_cpu::launch_kernel(*function.kernel, launch, addresses.data());
    } catch (const cuda_cpu::LaunchError& error) {
        die("%s: %s", function.name.c_str(), error.what());
    }
}

std::string described(const CUlaunchConfig& config, const Arguments& arguments) {
    std::ostringstream out;
    out << " <" << config.grid_x << ' ' << config.grid_y << ' ' << config.grid_z << " x " << config.block_x << ' '
        << config.block_y << ' ' << config.block_z << ", " << config.shared_bytes << '>' << arguments.text();
    return out.str();
}

CUresult check_sizes(const Function& function, const CUlaunchConfig& config) {
    const char* name = function.name.c_str();
    const auto [grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, attributes, num_attributes] =
        config;
    const bool is_grid =
        grid_x >= 1 && grid_y >= 1 && grid_z >= 1 && grid_x <= 0x7fffffff && grid_y <= 65535 && grid_z <= 65535;
    if (!is_grid) {
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: a grid of %u x %u x %u blocks", name, grid_x, grid_y, grid_z);
    }
    const uint64_t num_threads = uint64_t{block_x} * block_y * block_z;
    const bool is_block =
        num_threads >= 1 && block_x <= 1024 && block_y <= 1024 && block_z <= 64 && num_threads <= 1024;
    if (!is_block) {
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: blocks of %u x %u x %u threads", name, block_x, block_y, block_z);
    }
    if (function.kernel->max_threads != 0 && num_threads > function.kernel->max_threads) {
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: blocks of %llu threads, above the kernel's bound of %u", name,
                      static_cast<unsigned long long>(num_threads), function.kernel->max_threads);
    }
    if (shared_bytes > function.max_dynamic_shared_bytes) {
        return refuse(CUDA_ERROR_INVALID_VALUE,
                      "%s: %u bytes of dynamic shared memory, above the %zu that cuFuncSetAttribute allows", name,
                      shared_bytes, function.max_dynamic_shared_bytes);
    }
    return CUDA_SUCCESS;
}

CUresult launch(const CUlaunchConfig& config, CUfunction handle, void** values, void** extra) {
    return in_stream(config.stream, [&](Lock& lock, Stream& stream) {
        const auto function = driver().functions.find(handle);
        if (function == nullptr || function->context != stream.context) {
            return refuse(CUDA_ERROR_INVALID_HANDLE,
                          "a launch of a function that is null, unloaded, or of another context than the stream");
        }
        Context& context = *stream.context;
        if (extra != nullptr || config.num_attributes != 0) return CUDA_ERROR_NOT_SUPPORTED;
        if (values == nullptr && !function->kernel->arg_bytes.empty()) return CUDA_ERROR_INVALID_VALUE;
        if (const CUresult error = check_sizes(*function, config); error != CUDA_SUCCESS) return error;
        if (driver().options.fail_launch.strikes()) {
            return refuse(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "the launch of %s fails on purpose",
                          function->name.c_str());
        }
        cuda_cpu::Launch shape;
        shape.grid = {config.grid_x, config.grid_y, config.grid_z};
        shape.block = {config.block_x, config.block_y, config.block_z};
        shape.shared_bytes = config.shared_bytes;
        shape.seed = driver().random();
        const auto arguments = std::make_shared<const Arguments>(*function, values);
        Work work{Work::Kind::Kernel, function->name, [&context, function, shape, arguments] {
                      run_kernel(context, *function, shape, *arguments);
                  }};
        if (driver().options.print_work != 0) work.details = described(config, *arguments);
        return enqueue(lock, stream, std::move(work));
    });
}

}  // namespace
}  // namespace stand_in

using namespace stand_in;

API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void** values,
                            void** extra) {
    return launch({grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, nullptr, 0}, function,
                  values, extra);
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** values, void** extra) {
    return config == nullptr ? CUDA_ERROR_INVALID_VALUE : launch(*config, function, values, extra);
}

// Blocks run one after the other, so they cannot wait for each other.
API CUresult cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                       CUstream, void**) {
    return in_context([](Lock&, Context&) { return CUDA_ERROR_NOT_SUPPORTED; });
}
