//! The reply of a model, taken apart. The first byte is the format, the second where the reply begins and the length of
//! the pieces in which it arrives; the rest is the text.

#![no_main]

use inflight_fuzz::inputs::replies;
use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|input: &[u8]| -> Corpus { inflight_fuzz::corpus(replies::run(input)) });
