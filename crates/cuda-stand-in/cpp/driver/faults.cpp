// Names the fault when a program touches device memory from the host, or a kernel leaves its memory; then the process
// dies as it would without the stand-in.
#include <signal.h>
#include <unistd.h>

#include <cstdio>

#include "memory.h"

namespace stand_in {
namespace {

struct sigaction before_segv;
struct sigaction before_bus;

const Arena* arena_of(uintptr_t address, bool& is_inner) {
    for (const auto& device : driver().devices) {
        is_inner = device->memory.contains_inner(address);
        if (is_inner || device->memory.contains(address)) return &device->memory;
    }
    is_inner = false;
    return driver().host_memory->contains(address) ? driver().host_memory.get() : nullptr;
}

// The process is about to die, so that functions that are not safe in signal handlers cost nothing.
void explain(uintptr_t address) {
    // Without the mutex, the thread that faults may be the one that holds it.
    Lock lock(driver().mutex, std::try_to_lock);
    bool is_inner = false;
    const Arena* arena = arena_of(address, is_inner);
    if (arena == nullptr) return;
    const char* running = this_thread().running;
    const char* who = running == nullptr ? "the host" : running;
    const std::string where = arena->describe(is_inner ? arena->outer(address) : address);
    const char* hint = running != nullptr && !is_inner && arena != driver().host_memory.get()
                           ? "; the pointer was not among the arguments of the launch"
                           : "";
    char line[512];
    const int len = std::snprintf(line, sizeof line, "cuda-stand-in: %s touches %s%s\n", who, where.c_str(), hint);
    if (write(STDERR_FILENO, line, static_cast<size_t>(len)) < 0) return;
}

void handle(int signal, siginfo_t* info, void*) {
    explain(reinterpret_cast<uintptr_t>(info->si_addr));
    // The access is tried again, and meets whoever handled faults before.
    sigaction(signal, signal == SIGSEGV ? &before_segv : &before_bus, nullptr);
}

}  // namespace

void install_fault_handler() {
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &before_segv);
    sigaction(SIGBUS, &action, &before_bus);
}

}  // namespace stand_in
