//! A guide of a request, followed by an output that it allows.

#![no_main]

use inflight_fuzz::inputs::guide;
use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|input: &[u8]| -> Corpus { inflight_fuzz::corpus(guide::run(input)) });
