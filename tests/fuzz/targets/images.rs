//! An image of a request, decoded and processed for several models.

#![no_main]

use inflight_fuzz::inputs::images;
use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|input: &[u8]| -> Corpus { inflight_fuzz::corpus(images::run(input)) });
