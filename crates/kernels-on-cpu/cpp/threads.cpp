// Runs each CUDA thread as a thread of its own, so that the thread sanitizer sees races. Two teams of threads share the
// blocks of a launch, so that it also sees races between blocks.
//
// A launch that fails, or whose threads wait for each other in vain, ends the process: find out why with fibers.
#ifdef CUDA_CPU_THREADS

#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <thread>

#include "machine.h"

// Code of Rust is not instrumented: how its own threads wait for each other the sanitizer does not see. The stacks of
// CUDA threads have no such functions.
extern "C" const char* __tsan_default_suppressions() { return "race:_RN\n"; }

namespace cuda_cpu {

thread_local constinit Thread* running_thread = nullptr;
thread_local constinit Block* running_block = nullptr;

namespace {

constexpr unsigned NUM_TEAMS = 2;
constexpr unsigned WARP_SIZE = 32;

// A barrier that orders the accesses before it and after it.
class Barrier {
public:
    explicit Barrier(unsigned num_threads) { pthread_barrier_init(&barrier, nullptr, num_threads); }
    ~Barrier() { pthread_barrier_destroy(&barrier); }
    Barrier(const Barrier&) = delete;

    void wait() { pthread_barrier_wait(&barrier); }

private:
    pthread_barrier_t barrier;
};

// A barrier that orders nothing in the eyes of the thread sanitizer: a shuffle is no fence.
class Meeting {
public:
    explicit Meeting(unsigned num_threads) : num_threads(num_threads) {}

    void wait() {
        const uint32_t round = __atomic_load_n(&num_rounds, __ATOMIC_RELAXED);
        asm volatile("" ::: "memory");
        if (__atomic_add_fetch(&num_waiting, 1, __ATOMIC_RELAXED) == num_threads) {
            __atomic_store_n(&num_waiting, 0, __ATOMIC_RELAXED);
            __atomic_add_fetch(&num_rounds, 1, __ATOMIC_RELAXED);
            syscall(SYS_futex, &num_rounds, FUTEX_WAKE_PRIVATE, num_threads, nullptr, nullptr, 0);
        }
        while (__atomic_load_n(&num_rounds, __ATOMIC_RELAXED) == round) {
            syscall(SYS_futex, &num_rounds, FUTEX_WAIT_PRIVATE, round, nullptr, nullptr, 0);
        }
        asm volatile("" ::: "memory");
    }

private:
    const unsigned num_threads;
    uint32_t num_waiting = 0;
    uint32_t num_rounds = 0;
};

struct Team {
    Team(const Launch& launch, unsigned num_threads) : all(num_threads) {
        block.grid = launch.grid;
        block.dims = launch.block;
        for (unsigned first = 0; first < num_threads; first += WARP_SIZE) {
            const unsigned num_lanes = std::min(WARP_SIZE, num_threads - first);
            warps.emplace_back(num_lanes);
            meetings.emplace_back(num_lanes);
        }
        block.warps.resize(warps.size());
    }

    Block block;
    Barrier all;
    std::deque<Barrier> warps;
    std::deque<Meeting> meetings;
    std::vector<Dims> indices;
};

thread_local constinit Team* running_team = nullptr;

}  // namespace

void run(const Launch& launch, const std::function<void()>& body) {
    const unsigned num_threads = launch.block.count();
    std::deque<Team> teams;
    for (unsigned i = 0; i < NUM_TEAMS; ++i) teams.emplace_back(launch, num_threads);
    Random random(launch.seed);
    for (unsigned z = 0; z < launch.grid.z; ++z) {
        for (unsigned y = 0; y < launch.grid.y; ++y) {
            for (unsigned x = 0; x < launch.grid.x; ++x) teams[random.below(NUM_TEAMS)].indices.push_back({x, y, z});
        }
    }
    std::vector<std::thread> threads;
    for (Team& team : teams) {
        random.shuffle(team.indices);
        for (unsigned i = 0; i < num_threads; ++i) {
            threads.emplace_back([&launch, &body, &team, i, seed = random.next()] {
                Thread self;
                self.index = {i % launch.block.x, i / launch.block.x % launch.block.y,
                              i / (launch.block.x * launch.block.y)};
                self.lane = i % WARP_SIZE;
                self.warp = i / WARP_SIZE;
                self.random = Random(seed);
                running_thread = &self;
                running_block = &team.block;
                running_team = &team;
                for (const Dims index : team.indices) {
                    team.all.wait();
                    if (i == 0) {
                        team.block.index = index;
                        team.block.shared.begin_block(launch.shared_bytes);
                    }
                    team.all.wait();
                    self.copies.clear();
                    self.groups.clear();
                    body();
                }
            });
        }
    }
    for (std::thread& thread : threads) thread.join();
}

void wait_for_block(Place) { running_team->all.wait(); }

void wait_for_warp(Place) { running_team->warps[current_thread().warp].wait(); }

void wait_for_exchange(Place) { running_team->meetings[current_thread().warp].wait(); }

void fail(Place place, const char* what) {
    fprintf(stderr, "%s:%d: %s\n", place.file, place.line, what);
    _exit(1);
}

}  // namespace cuda_cpu

#endif
