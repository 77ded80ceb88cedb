#include "../shared.h"

#include "memory.h"
#include "streams.h"

using namespace stand_in;

__attribute__((visibility("default"))) CUresult cuStandInEnqueue(CUstream handle, const char* name,
                                                                 const CuStandInOperand* operands, size_t num_operands,
                                                                 bool (*run)(void*, void* const*), void (*drop)(void*),
                                                                 void* state) {
    const std::shared_ptr<void> owned(state, drop);
    return in_stream(handle, [&](Lock& lock, Stream& stream) {
        const std::vector<CuStandInOperand> all(operands, operands + num_operands);
        for (const CuStandInOperand& operand : all) {
            if (const CUresult error = check_range(name, operand.address, operand.num_bytes); error != CUDA_SUCCESS)
                return error;
        }
        Work work{Work::Kind::Kernel, name, nullptr};
        work.poll = [all, run, owned] {
            std::vector<void*> addresses;
            for (const CuStandInOperand& operand : all) addresses.push_back(resolve(operand.address, operand.num_bytes));
            return run(owned.get(), addresses.data());
        };
        return enqueue(lock, stream, std::move(work));
    });
}
