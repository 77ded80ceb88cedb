// Events: a point in a stream, or in the graph that captures it.
#pragma once
#include <atomic>
#include <chrono>

#include "streams.h"

namespace stand_in {

struct Event {
    using Clock = std::chrono::steady_clock;

    std::shared_ptr<Context> context;
    bool has_time = true;
    Point last;                               // of the last record; without a stream if there is none
    std::shared_ptr<Clock::time_point> time;  // when that record ran

    // If the last record was captured.
    std::shared_ptr<Capture> capture;
    std::vector<size_t> frontier;
};

}  // namespace stand_in
