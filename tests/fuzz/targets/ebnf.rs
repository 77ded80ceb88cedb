//! An EBNF grammar of a request, converted to Lark's syntax.

#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use triton_inflight::guidance::{GuideSpec, ebnf_to_lark};

fuzz_target!(|text: &str| -> Corpus {
    if GuideSpec::Grammar(text.to_owned()).check().is_err() {
        return Corpus::Reject;
    }
    let _ = ebnf_to_lark(text);
    Corpus::Keep
});
