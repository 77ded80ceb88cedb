// Graphs of work, as streams were captured, and their executable copies.
#pragma once
#include "streams.h"

namespace stand_in {

struct Node {
    Work work;
    std::vector<size_t> after;  // nodes before this one
};

struct Graph {
    std::shared_ptr<Context> context;
    std::vector<Node> nodes;  // in an order in which they could run
};

struct GraphExec {
    std::shared_ptr<Context> context;
    std::shared_ptr<const std::vector<Node>> nodes;  // launches keep those that they were made with
    Point last_launch;                               // runs of one executable graph follow each other
};

}  // namespace stand_in
