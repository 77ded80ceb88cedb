//! The header of a GGUF file: its metadata, its tensors, and the model that they describe.

#![no_main]

use std::sync::LazyLock;

use inflight_fuzz::Folder;
use libfuzzer_sys::fuzz_target;
use triton_inflight::runner::ModelSource;

static FOLDER: LazyLock<Folder> = LazyLock::new(Folder::new);

/// Room for the tensors of the fixtures, so that an input need not hold more than a header.
const NUM_TENSOR_BYTES: u64 = 1 << 20;

fuzz_target!(|file: &[u8]| {
    FOLDER.write_padded("model.gguf", file, NUM_TENSOR_BYTES);
    if let Ok(source) = ModelSource::open(FOLDER.path()) {
        let _ = source.num_weight_bytes(None);
    }
});
