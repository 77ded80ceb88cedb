//! `model.safetensors` of a checkpoint with a valid `config.json`.

#![no_main]

use inflight_fuzz::inputs::safetensors;
use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|input: &[u8]| -> Corpus { inflight_fuzz::corpus(safetensors::run(input)) });
