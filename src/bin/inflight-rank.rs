//! Another rank of a model: the backend starts it, see `src/runner/ranks/`.

use std::process::ExitCode;

fn main() -> ExitCode {
    triton_inflight::runner::rank_main()
}
