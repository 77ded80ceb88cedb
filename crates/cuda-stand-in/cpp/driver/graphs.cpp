#include "graphs.h"

#include "captures.h"
#include "reports.h"

namespace stand_in {
namespace {

// One launch: nodes run in a random order among those that the graph permits, a node a step, so that other streams
// come in between.
class Run {
public:
    Run(std::shared_ptr<Context> context, std::shared_ptr<const std::vector<Node>> nodes, uint64_t seed)
        : context_(std::move(context)), nodes_(std::move(nodes)), random_(seed), num_open_(nodes_->size()) {
        for (size_t i = 0; i < nodes_->size(); ++i) {
            num_open_[i] = (*nodes_)[i].after.size();
            if (num_open_[i] == 0) ready_.push_back(i);
        }
    }

    // True if it was the last one.
    bool step() {
        if (ready_.empty()) return true;
        std::swap(ready_[random_() % ready_.size()], ready_.back());
        const size_t chosen = ready_.back();
        ready_.pop_back();
        if (!run(*context_, (*nodes_)[chosen].work)) {
            ready_.push_back(chosen);
            return false;
        }
        for (size_t i = chosen + 1; i < nodes_->size(); ++i) {
            for (const size_t before : (*nodes_)[i].after) {
                if (before == chosen && --num_open_[i] == 0) ready_.push_back(i);
            }
        }
        return ready_.empty();
    }

private:
    std::shared_ptr<Context> context_;
    std::shared_ptr<const std::vector<Node>> nodes_;
    std::mt19937_64 random_;
    std::vector<size_t> num_open_;  // nodes before each one that have not run
    std::vector<size_t> ready_;
};

CUgraphExecUpdateResult compare(const std::vector<Node>& nodes, const std::vector<Node>& others) {
    if (nodes.size() != others.size()) return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    for (size_t i = 0; i < nodes.size(); ++i) {
        if (nodes[i].after != others[i].after) return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        if (nodes[i].work.kind != others[i].work.kind) return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
    }
    return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

}  // namespace
}  // namespace stand_in

using namespace stand_in;

API CUresult cuGraphInstantiateWithFlags(CUgraphExec* handle, CUgraph graph_handle, unsigned long long flags) {
    constexpr auto KNOWN =
        CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
    return in_context([&](Lock&, Context&) {
        const auto graph = driver().graphs.find(graph_handle);
        if (graph == nullptr || (flags & ~static_cast<unsigned long long>(KNOWN)) != 0) return CUDA_ERROR_INVALID_VALUE;
        auto exec = std::make_shared<GraphExec>();
        exec->context = graph->context;
        exec->nodes = std::make_shared<const std::vector<Node>>(graph->nodes);
        *handle = driver().graph_execs.insert(exec);
        return CUDA_SUCCESS;
    });
}

API CUresult cuGraphInstantiate_v2(CUgraphExec* handle, CUgraph graph, CUgraphNode*, char*, size_t) {
    return cuGraphInstantiateWithFlags(handle, graph, 0);
}

API CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
    return in_stream(stream_handle, [&](Lock& lock, Stream& stream) {
        const auto exec = driver().graph_execs.find(handle);
        if (exec == nullptr) return refuse(CUDA_ERROR_INVALID_VALUE, "cuGraphLaunch: no such graph");
        if (stream.capture != nullptr) return refuse_capturing(stream, "cuGraphLaunch");
        if (const CUresult error = refuse_implicit(stream, "cuGraphLaunch"); error != CUDA_SUCCESS) return error;
        if (driver().options.fail_launch.strikes()) {
            return refuse(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "the launch of a graph fails on purpose");
        }
        auto run = std::make_shared<Run>(exec->context, exec->nodes, driver().random());
        append(lock, stream, {"a graph", [run] { return run->step(); }, {exec->last_launch}});
        exec->last_launch = end_of(stream);
        return CUDA_SUCCESS;
    });
}

API CUresult cuGraphUpload(CUgraphExec handle, CUstream stream_handle) {
    return in_stream(stream_handle, [&](Lock&, Stream&) {
        return driver().graph_execs.find(handle) == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    });
}

// Takes the parameters of another graph of the same shape; launches before this call keep theirs.
API CUresult cuGraphExecUpdate_v2(CUgraphExec handle, CUgraph graph_handle, CUgraphExecUpdateResultInfo* info) {
    return in_context([&](Lock&, Context&) {
        const auto exec = driver().graph_execs.find(handle);
        const auto graph = driver().graphs.find(graph_handle);
        if (exec == nullptr || graph == nullptr || info == nullptr) return CUDA_ERROR_INVALID_VALUE;
        *info = {compare(*exec->nodes, graph->nodes), nullptr, nullptr};
        if (info->result != CU_GRAPH_EXEC_UPDATE_SUCCESS) return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
        exec->nodes = std::make_shared<const std::vector<Node>>(graph->nodes);
        return CUDA_SUCCESS;
    });
}

// Only counts: the stand-in's nodes have no handles.
API CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, size_t* num_nodes) {
    return in_context([&](Lock&, Context&) {
        const auto graph = driver().graphs.find(handle);
        if (graph == nullptr || num_nodes == nullptr) return CUDA_ERROR_INVALID_VALUE;
        if (nodes != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
        *num_nodes = graph->nodes.size();
        return CUDA_SUCCESS;
    });
}

API CUresult cuGraphDestroy(CUgraph handle) {
    return in_context([&](Lock&, Context&) {
        return driver().graphs.remove(handle) == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    });
}

// Launches that have not run yet still run.
API CUresult cuGraphExecDestroy(CUgraphExec handle) {
    return in_context([&](Lock&, Context&) {
        return driver().graph_execs.remove(handle) == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    });
}
