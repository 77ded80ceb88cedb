//! Shared by the fuzz targets.

pub mod inputs;

use libfuzzer_sys::Corpus;

/// Whether libFuzzer may keep an input.
pub fn corpus(input: inputs::Input) -> Corpus {
    match input {
        inputs::Input::Useful => Corpus::Keep,
        inputs::Input::Useless => Corpus::Reject,
    }
}
