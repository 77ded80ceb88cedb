// What a test can ask of the stand-in: its devices, and errors on purpose. Each option is a number, given by an
// environment variable CUDA_STAND_IN_<NAME> before cuInit, or later by cuStandInSet(<NAME>, value).
#pragma once
#include "../api.h"

namespace stand_in {

// Counts events of a kind, and strikes at one of them.
class Fault {
public:
    // Counts one more event; true if it is the one that must fail.
    bool strikes() { return ++num_events_ == strike_at_; }

    // Lets the n-th event from now on fail; 0: none.
    void arm(uint64_t n) { strike_at_ = n == 0 ? 0 : num_events_ + n; }

    uint64_t num_events() const { return num_events_; }

private:
    uint64_t num_events_ = 0;
    uint64_t strike_at_ = 0;
};

struct Options {
    uint64_t num_devices = 1;
    uint64_t memory_bytes = uint64_t{2} << 30;  // of each device
    uint64_t other_memory_bytes = 0;            // that of all devices but the first; 0: the same
    uint64_t compute_capability = 90;           // ten times the major number, plus the minor one
    uint64_t other_capability = 0;              // that of all devices but the first; 0: the same
    uint64_t driver_version = 12040;
    uint64_t init_error = CUDA_SUCCESS;    // what cuInit returns
    uint64_t module_error = CUDA_SUCCESS;  // what cuModuleLoadData returns: 222 and 209 mean a driver that is too old
    uint64_t lost_error = CUDA_ERROR_ILLEGAL_ADDRESS;  // what every call returns once the device is lost
    uint64_t seed = 0;                                 // of the order in which streams run
    uint64_t run_after_ms = 0;                         // work that nobody waits for runs after this time; 0: never
    uint64_t report_leaks = 0;                         // 1: lists what was not freed, at exit
    uint64_t print_work = 0;                           // 1: lists all work as it is enqueued or captured

    Fault fail_allocation;       // the n-th allocation of device memory: CUDA_ERROR_OUT_OF_MEMORY
    Fault fail_host_allocation;  // the n-th allocation of pinned host memory: CUDA_ERROR_OUT_OF_MEMORY
    Fault fail_launch;           // the n-th launch of a kernel or graph: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    Fault fail_collective;       // the n-th call of a collective operation: ncclInternalError
    Fault stall_collective;      // the n-th collective operation never ends, until its communicator is aborted
    Fault spoil_collective;      // the n-th call of a collective operation gives its rank a first number that is 1 too large
    Fault lose_device;           // the device on which the n-th operation runs is lost with lost_error

    // From the environment; ends the process at a name or value that it does not understand.
    void read_environment();

    // Of a device.
    int capability_of(int ordinal) const {
        return static_cast<int>(ordinal > 0 && other_capability != 0 ? other_capability : compute_capability);
    }

    uint64_t memory_of(int ordinal) const {
        return ordinal > 0 && other_memory_bytes != 0 ? other_memory_bytes : memory_bytes;
    }

    // False if there is no such option.
    bool set(const char* name, uint64_t value);
};

}  // namespace stand_in
