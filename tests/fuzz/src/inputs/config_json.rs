//! `config.json` of a checkpoint with the weights of a small model.

use std::sync::LazyLock;

use inflight_runner::ModelSource;

use super::{Folder, Input};

static FOLDER: LazyLock<Folder> = LazyLock::new(|| {
    let folder = Folder::new();
    folder.copy("tests/fixtures/llama3/model.safetensors");
    folder
});

/// Runs one input.
pub fn run(config: &[u8]) -> Input {
    FOLDER.write("config.json", config);
    if let Ok(source) = ModelSource::open(FOLDER.path()) {
        let _ = source.num_weight_bytes(None);
    }
    Input::Useful
}
