//! An EBNF grammar of a request, converted to Lark's syntax.

use inflight_guidance::{GuideSpec, ebnf_to_lark};

use super::Input;

/// Runs one input.
pub fn run(text: &[u8]) -> Input {
    let Ok(text) = std::str::from_utf8(text) else {
        return Input::Useless;
    };
    if GuideSpec::Grammar(text.to_owned()).check().is_err() {
        return Input::Useless;
    }
    let _ = ebnf_to_lark(text);
    Input::Useful
}
