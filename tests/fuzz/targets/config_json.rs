//! `config.json` of a checkpoint with the weights of a small model.

#![no_main]

use inflight_fuzz::inputs::config_json;
use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|input: &[u8]| -> Corpus { inflight_fuzz::corpus(config_json::run(input)) });
