//! A chat template and the messages of a request. The input is the template, the line `---`, and the messages in JSON.

#![no_main]

use inflight_fuzz::inputs::chat_template;
use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|input: &[u8]| -> Corpus { inflight_fuzz::corpus(chat_template::run(input)) });
