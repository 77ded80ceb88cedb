// Runs each CUDA thread of a block as a fiber, one block after the other. A fiber runs until it waits for others; who
// runs next is random, a pure function of the launch's seed.
#ifndef CUDA_CPU_THREADS

#ifndef __x86_64__
#error "fibers switch stacks with x86-64 instructions; on other processors build with -DCUDA_CPU_THREADS"
#endif

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>

#include "machine.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Pushes the registers that a function must preserve, leaves the stack pointer in *from, and goes on with the stack
// `to`. By a jump: a processor expects that a `ret` follows the last call, which came from the other stack.
extern "C" void cuda_cpu_switch_stack(void** from, void* to);
asm(R"(
    .text
    .type cuda_cpu_switch_stack, @function
cuda_cpu_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
    .size cuda_cpu_switch_stack, .-cuda_cpu_switch_stack
)");

namespace cuda_cpu {

thread_local constinit Thread* running_thread CUDA_CPU_STATIC_TLS = nullptr;
thread_local constinit Block* running_block CUDA_CPU_STATIC_TLS = nullptr;

namespace {

constexpr size_t PAGE_BYTES = 4096;
constexpr size_t STACK_BYTES = 64 << 10;
// Stacks begin at one of so many distances from a page, so that those of a block do not share the lines of a cache.
constexpr size_t NUM_COLOURS = 16, COLOUR_BYTES = 256;
constexpr unsigned WARP_SIZE = 32;

// Memory for a stack, with a page below it that must not be touched.
class Stack {
public:
    Stack() {
        void* const mapped = mmap(nullptr, PAGE_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED) throw LaunchError("no memory for the stack of a fiber");
        memory = static_cast<char*>(mapped);
        mprotect(memory, PAGE_BYTES, PROT_NONE);
    }
    Stack(Stack&& other) : memory(std::exchange(other.memory, nullptr)) {}
    ~Stack() {
        if (memory == nullptr) return;
        clear();
        munmap(memory, PAGE_BYTES + STACK_BYTES);
    }

    // Lets the address sanitizer forget frames that never ended.
    void clear() {
#ifdef __SANITIZE_ADDRESS__
        ASAN_UNPOISON_MEMORY_REGION(bottom(), STACK_BYTES);
#endif
    }

    char* bottom() const { return memory + PAGE_BYTES; }
    char* top() const { return bottom() + STACK_BYTES; }

private:
    char* memory;
};

enum class State { Ready, AtWarp, AtBlock, Done };

struct Fiber {
    explicit Fiber() = default;

    Stack stack;
    void* stack_pointer = nullptr;
    State state = State::Ready;
    Place place{nullptr, 0};
    Thread thread;
};

std::string text(Place place) { return std::string(place.file) + ":" + std::to_string(place.line); }

bool is_same(Place a, Place b) { return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0); }

// Which lane runs next. Of any warp, so that parts of warps progress together; or all lanes of a warp that can run,
// each once: of any warp, or of the first one in a random order, so that one warp runs ahead of another as far as
// barriers let it.
enum class Order { AnyLane, AnyWarp, FirstWarp };

class Machine {
public:
    void run(const Launch& launch, const std::function<void()>& body);

    // Called on a fiber's stack.
    void wait(State state, Place place);
    [[noreturn]] void fail(std::string what);
    [[noreturn]] void fiber_main();

private:
    void run_block(Dims index, const std::function<void()>& body);
    Fiber& pick();
    size_t choose_warp();
    void resume(Fiber& fiber);
    void arrive(Fiber& fiber);
    void release(unsigned first, unsigned end, const char* what);
    std::string stuck() const;

    std::vector<Fiber> fibers;
    Block block;
    Random random{0};
    const std::function<void()>* body = nullptr;
    std::optional<std::string> error;

    // Fibers of each warp that can run, and warps that have such, in no order.
    std::vector<std::vector<unsigned>> ready;
    std::vector<unsigned> ready_warps;
    std::vector<unsigned> ranks;
    Order order = Order::AnyLane;
    // In `ready_warps`: the warp whose lanes run, if it has been chosen.
    std::optional<size_t> chosen;

    unsigned num_threads = 0, num_done = 0, num_at_block = 0;
    std::vector<unsigned> num_at_warp;

    Fiber* running = nullptr;
    void* scheduler = nullptr;
#ifdef __SANITIZE_ADDRESS__
    const void* scheduler_bottom = nullptr;
    size_t scheduler_bytes = 0;
#endif
};

// The machine of this thread, once the thread has run a kernel.
thread_local constinit Machine* running_machine CUDA_CPU_STATIC_TLS = nullptr;

void Machine::run(const Launch& launch, const std::function<void()>& body) {
    num_threads = launch.block.count();
    while (fibers.size() < num_threads) fibers.emplace_back();
    const unsigned num_warps = (num_threads + WARP_SIZE - 1) / WARP_SIZE;
    ready.resize(num_warps);
    block.grid = launch.grid;
    block.dims = launch.block;
    block.warps.resize(num_warps);
    running_block = &block;
    random = Random(launch.seed);
    std::vector<Dims> indices;
    for (unsigned z = 0; z < launch.grid.z; ++z) {
        for (unsigned y = 0; y < launch.grid.y; ++y) {
            for (unsigned x = 0; x < launch.grid.x; ++x) indices.push_back({x, y, z});
        }
    }
    random.shuffle(indices);
    for (const Dims index : indices) {
        block.shared.begin_block(launch.shared_bytes);
        run_block(index, body);
    }
}

void Machine::run_block(Dims index, const std::function<void()>& block_body) {
    body = &block_body;
    block.index = index;
    error.reset();
    num_done = num_at_block = 0;
    num_at_warp.assign(ready.size(), 0);
    ready_warps.clear();
    for (auto& warp : ready) warp.clear();
    chosen.reset();
    // Lanes of any warp take longest, since their stacks come from memory farther away.
    order = std::array{Order::AnyLane, Order::AnyWarp, Order::AnyWarp, Order::FirstWarp}[random.below(4)];
    ranks.resize(ready.size());
    for (unsigned i = 0; i < ranks.size(); ++i) ranks[i] = i;
    random.shuffle(ranks);
    for (unsigned i = 0; i < num_threads; ++i) {
        Fiber& fiber = fibers[i];
        Thread& thread = fiber.thread;
        thread.index = {i % block.dims.x, i / block.dims.x % block.dims.y, i / (block.dims.x * block.dims.y)};
        thread.lane = i % WARP_SIZE;
        thread.warp = i / WARP_SIZE;
        thread.random = Random(random.next());
        thread.num_exchanges = 0;
        thread.copies.clear();
        thread.groups.clear();
        fiber.stack.clear();
        // The registers that the first switch pops, the function that it returns to, and that function's return
        // address, to which it never returns.
        void** const top = reinterpret_cast<void**>(fiber.stack.top() - i % NUM_COLOURS * COLOUR_BYTES);
        std::fill(top - 8, top, nullptr);
        top[-2] = reinterpret_cast<void*>(static_cast<void (*)()>([] { running_machine->fiber_main(); }));
        fiber.stack_pointer = top - 8;
        fiber.state = State::Ready;
        if (thread.lane == 0) ready_warps.push_back(thread.warp);
        ready[thread.warp].push_back(i);
    }
    while (!ready_warps.empty()) {
        Fiber& fiber = pick();
        resume(fiber);
        if (error) break;
        arrive(fiber);
        if (error) break;
    }
    running_thread = nullptr;
    if (!error && num_done < num_threads) error = stuck();
    if (error) {
        const Dims at = block.index;
        throw LaunchError(*error + " (block " + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " +
                          std::to_string(at.z) + ")");
    }
}

// Takes a fiber that can run.
Fiber& Machine::pick() {
    if (!chosen) chosen = choose_warp();
    const size_t at = *chosen;
    auto& warp = ready[ready_warps[at]];
    std::swap(warp[random.below(warp.size())], warp.back());
    Fiber& fiber = fibers[warp.back()];
    warp.pop_back();
    if (warp.empty()) {
        ready_warps[at] = ready_warps.back();
        ready_warps.pop_back();
    }
    if (warp.empty() || order == Order::AnyLane) chosen.reset();
    return fiber;
}

// In `ready_warps`.
size_t Machine::choose_warp() {
    if (order != Order::FirstWarp) return random.below(ready_warps.size());
    const auto by_rank = [&](unsigned a, unsigned b) { return ranks[a] < ranks[b]; };
    return std::min_element(ready_warps.begin(), ready_warps.end(), by_rank) - ready_warps.begin();
}

void Machine::resume(Fiber& fiber) {
    running = &fiber;
    running_thread = &fiber.thread;
#ifdef __SANITIZE_ADDRESS__
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, fiber.stack.bottom(), STACK_BYTES);
#endif
    cuda_cpu_switch_stack(&scheduler, fiber.stack_pointer);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

// Counts a fiber that has stopped, and releases those who waited for it.
void Machine::arrive(Fiber& fiber) {
    const unsigned warp = fiber.thread.warp, first = warp * WARP_SIZE;
    const unsigned end = std::min(num_threads, first + WARP_SIZE);
    switch (fiber.state) {
    case State::AtWarp:
        if (++num_at_warp[warp] == end - first) {
            num_at_warp[warp] = 0;
            release(first, end, "lanes of a warp wait for each other at different places");
        }
        break;
    case State::AtBlock:
        if (++num_at_block == num_threads) {
            num_at_block = 0;
            release(0, num_threads, "threads of a block wait for each other at different places");
        }
        break;
    case State::Done:
        ++num_done;
        break;
    case State::Ready:
        break;
    }
}

void Machine::release(unsigned first, unsigned end, const char* what) {
    for (unsigned i = first; i < end; ++i) {
        if (!is_same(fibers[i].place, fibers[first].place)) {
            error = std::string(what) + ": " + text(fibers[first].place) + " and " + text(fibers[i].place);
            return;
        }
        fibers[i].state = State::Ready;
        if (ready[i / WARP_SIZE].empty()) ready_warps.push_back(i / WARP_SIZE);
        ready[i / WARP_SIZE].push_back(i);
    }
}

// Who waits where, when nobody can go on.
std::string Machine::stuck() const {
    std::vector<std::pair<std::string, unsigned>> places;
    for (unsigned i = 0; i < num_threads; ++i) {
        const Fiber& fiber = fibers[i];
        if (fiber.state == State::Done) continue;
        const std::string place = text(fiber.place) + (fiber.state == State::AtWarp ? " for their warp" : " for their block");
        if (places.empty() || places.back().first != place) places.push_back({place, 0});
        ++places.back().second;
    }
    std::string what = "threads wait for others that never come: ";
    for (const auto& [place, num_waiting] : places) what += std::to_string(num_waiting) + " at " + place + ", ";
    return what + std::to_string(num_done) + " have ended";
}

void Machine::wait(State state, Place place) {
    Fiber& fiber = *running;
    fiber.state = state;
    fiber.place = place;
#ifdef __SANITIZE_ADDRESS__
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(state == State::Done ? nullptr : &fake_stack, scheduler_bottom, scheduler_bytes);
#endif
    cuda_cpu_switch_stack(&fiber.stack_pointer, scheduler);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake_stack, &scheduler_bottom, &scheduler_bytes);
#endif
}

void Machine::fail(std::string what) {
    error = std::move(what);
    wait(State::Done, {nullptr, 0});
    __builtin_unreachable();
}

void Machine::fiber_main() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_bytes);
#endif
    (*body)();
    wait(State::Done, {nullptr, 0});
    __builtin_unreachable();
}

}  // namespace

void run(const Launch& launch, const std::function<void()>& body) {
    // A library that is opened later has room for little more than a pointer there.
    static thread_local std::unique_ptr<Machine> machine CUDA_CPU_STATIC_TLS;
    if (!machine) machine = std::make_unique<Machine>();
    running_machine = machine.get();
    machine->run(launch, body);
}

void wait_for_block(Place place) { running_machine->wait(State::AtBlock, place); }

void wait_for_warp(Place place) { running_machine->wait(State::AtWarp, place); }

void wait_for_exchange(Place place) { running_machine->wait(State::AtWarp, place); }

void fail(Place place, const char* what) { running_machine->fail(text(place) + ": " + what); }

}  // namespace cuda_cpu

#endif
