"""A real tritonserver with our backend, its model repositories, and its clients: for tests and benches."""

import os

# gRPC's handlers of fork() abort the child now and then before it becomes a server, when a client of the parent is
# in the middle of something. They are for children that go on with gRPC; ours are other programs at once. Read when
# gRPC is imported, which this package does later.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
