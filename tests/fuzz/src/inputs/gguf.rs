//! The header of a GGUF file: its metadata, its tensors, and the model that they describe.

use std::sync::LazyLock;

use inflight_runner::ModelSource;

use super::{Folder, Input};

static FOLDER: LazyLock<Folder> = LazyLock::new(Folder::new);

/// Room for the tensors of the fixtures, so that an input need not hold more than a header.
const NUM_TENSOR_BYTES: u64 = 1 << 20;

/// Runs one input.
pub fn run(file: &[u8]) -> Input {
    FOLDER.write_padded("model.gguf", file, NUM_TENSOR_BYTES);
    if let Ok(source) = ModelSource::open(FOLDER.path()) {
        let _ = source.num_weight_bytes(None);
    }
    Input::Useful
}
