#!/bin/sh
# Another rank of a model, for tests: their own program.
INFLIGHT_TEST_RANK=1 exec "/proc/$PPID/exe" --exact rank_processes::is_another_rank_if_started_as_one --nocapture
