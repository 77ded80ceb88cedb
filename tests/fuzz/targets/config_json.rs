//! `config.json` of a checkpoint with the weights of a small model.

#![no_main]

use std::sync::LazyLock;

use inflight_fuzz::Folder;
use libfuzzer_sys::fuzz_target;
use triton_inflight::runner::ModelSource;

static FOLDER: LazyLock<Folder> = LazyLock::new(|| {
    let folder = Folder::new();
    folder.copy("tests/fixtures/llama3/model.safetensors");
    folder
});

fuzz_target!(|config: &[u8]| {
    FOLDER.write("config.json", config);
    if let Ok(source) = ModelSource::open(FOLDER.path()) {
        let _ = source.num_weight_bytes(None);
    }
});
