//! The parameters of a request, as a JSON object like the body of Triton's `/generate`.

#![no_main]

use inflight_fuzz::inputs::request_options;
use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|input: &[u8]| -> Corpus { inflight_fuzz::corpus(request_options::run(input)) });
