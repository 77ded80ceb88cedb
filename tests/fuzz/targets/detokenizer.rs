//! Token ids that become text one by one. The first byte is the number of prompt tokens; two bytes follow for each id.

#![no_main]

use inflight_fuzz::inputs::detokenizer;
use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|input: &[u8]| -> Corpus { inflight_fuzz::corpus(detokenizer::run(input)) });
