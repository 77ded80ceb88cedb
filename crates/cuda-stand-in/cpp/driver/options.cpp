#include "options.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "../shared.h"
#include "driver.h"
#include "reports.h"

extern char** environ;

namespace stand_in {
namespace {

constexpr char PREFIX[] = "CUDA_STAND_IN_";

struct Number {
    const char* name;
    uint64_t Options::*value;
};

constexpr Number NUMBERS[] = {
    {"DEVICES", &Options::num_devices},
    {"MEMORY_BYTES", &Options::memory_bytes},
    {"OTHER_MEMORY_BYTES", &Options::other_memory_bytes},
    {"COMPUTE_CAPABILITY", &Options::compute_capability},
    {"OTHER_CAPABILITY", &Options::other_capability},
    {"DRIVER_VERSION", &Options::driver_version},
    {"INIT_ERROR", &Options::init_error},
    {"MODULE_ERROR", &Options::module_error},
    {"LOST_ERROR", &Options::lost_error},
    {"SEED", &Options::seed},
    {"RUN_AFTER_MS", &Options::run_after_ms},
    {"REPORT_LEAKS", &Options::report_leaks},
    {"PRINT_WORK", &Options::print_work},
};

struct NamedFault {
    const char* name;
    Fault Options::*fault;
};

constexpr NamedFault FAULTS[] = {
    {"FAIL_ALLOCATION", &Options::fail_allocation},
    {"FAIL_HOST_ALLOCATION", &Options::fail_host_allocation},
    {"FAIL_LAUNCH", &Options::fail_launch},
    {"FAIL_COLLECTIVE", &Options::fail_collective},
    {"STALL_COLLECTIVE", &Options::stall_collective},
    {"SPOIL_COLLECTIVE", &Options::spoil_collective},
    {"LOSE_DEVICE", &Options::lose_device},
};

}  // namespace

bool Options::set(const char* name, uint64_t value) {
    for (const Number& number : NUMBERS) {
        if (std::strcmp(number.name, name) == 0) {
            this->*number.value = value;
            return true;
        }
    }
    for (const NamedFault& named : FAULTS) {
        if (std::strcmp(named.name, name) == 0) {
            (this->*named.fault).arm(value);
            return true;
        }
    }
    return false;
}

void Options::read_environment() {
    for (char** entry = environ; *entry != nullptr; ++entry) {
        if (std::strncmp(*entry, PREFIX, std::strlen(PREFIX)) != 0) continue;
        const std::string variable = *entry;
        const size_t equals = variable.find('=');
        const std::string name = variable.substr(std::strlen(PREFIX), equals - std::strlen(PREFIX));
        const char* text = *entry + equals + 1;
        char* end = nullptr;
        errno = 0;
        const uint64_t value = std::strtoull(text, &end, 10);
        if (errno != 0 || end == text || *end != '\0') die("%s must be a number", variable.c_str());
        if (!set(name.c_str(), value)) die("there is no option %s", variable.c_str());
    }
}

}  // namespace stand_in

using namespace stand_in;

// Changes an option while the program runs; a fault strikes at the n-th event from now on.
API CUresult cuStandInSet(const char* name, unsigned long long value) {
    Lock lock(driver().mutex);
    return driver().options.set(name, value) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Counts so far, by the names of the faults that count them.
API CUresult cuStandInCount(const char* name, unsigned long long* count) {
    Lock lock(driver().mutex);
    for (const NamedFault& named : FAULTS) {
        if (std::strcmp(named.name, name) == 0) {
            *count = (driver().options.*named.fault).num_events();
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_VALUE;
}

__attribute__((visibility("default"))) bool cuStandInStrikes(const char* name) {
    Lock lock(driver().mutex);
    for (const NamedFault& named : FAULTS) {
        if (std::strcmp(named.name, name) == 0) return (driver().options.*named.fault).strikes();
    }
    return false;
}
