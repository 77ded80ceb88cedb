//! The header of a GGUF file: its metadata, its tensors, and the model that they describe.

#![no_main]

use inflight_fuzz::inputs::gguf;
use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|input: &[u8]| -> Corpus { inflight_fuzz::corpus(gguf::run(input)) });
