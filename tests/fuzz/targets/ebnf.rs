//! An EBNF grammar of a request, converted to Lark's syntax.

#![no_main]

use inflight_fuzz::inputs::ebnf;
use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|input: &[u8]| -> Corpus { inflight_fuzz::corpus(ebnf::run(input)) });
