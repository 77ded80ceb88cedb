"""A real tritonserver with our backend, its model repositories, and its clients: for tests and benchmarks."""

import os

# gRPC's fork handlers sometimes abort a child before it becomes a server, when a client in the parent is
# busy. They are for children that continue to use gRPC; ours run other programs immediately. Read when gRPC is
# imported, which this package does later.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
