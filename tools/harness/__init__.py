"""A real tritonserver with our backend, its model repositories, and its clients: for tests and benches."""
