//! A guide of a request, and an output that it allows: no token costs more than the limit of work, and what is offered
//! leads on.
//!
//! The first byte of an input chooses the kind of its guide, the second the output, and the rest is the guide.

#[path = "../../../support/guided_output.rs"]
mod guided_output;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use inflight_guidance::{Compiler, GrammarGuide, GuideSpec, MAX_LOOKUPS};
use inflight_sampling::SampleError;
use inflight_text::Tokenizer;

use super::{Input, repository};
use guided_output::{END_ID, Output, VOCAB_SIZE};

/// Enough for the cost of an ambiguous guide to grow beyond what one token may cost.
const MAX_TOKENS: usize = 100;

/// Runs one input.
pub fn run(input: &[u8]) -> Input {
    let Some((spec, seed)) = parse(input) else {
        return Input::Useless;
    };
    let Some(guide) = guide(spec) else {
        return Input::Useless;
    };
    let mut output = Output::new(u64::from(seed));
    while output.tokens.len() < MAX_TOKENS {
        let grown = output.grow(&guide);
        let num_lookups = guide.max_lookups();
        assert!(num_lookups <= MAX_LOOKUPS, "{num_lookups} look-ups");
        match grown {
            Ok(true) => {}
            Ok(false) => break,
            Err(SampleError::GuideTooComplex) => break,
            Err(error) => panic!("after {:?}: {error}", output.tokens),
        }
    }
    Input::Useful
}

fn parse(input: &[u8]) -> Option<(GuideSpec, u8)> {
    let [kind, seed, text @ ..] = input else {
        return None;
    };
    let text = std::str::from_utf8(text).ok()?;
    let spec = match kind % 3 {
        0 => GuideSpec::Grammar(text.to_owned()),
        1 => GuideSpec::JsonSchema(serde_json::from_str(text).ok()?),
        _ => GuideSpec::Regex(text.to_owned()),
    };
    Some((spec, *seed))
}

/// `None` if the guide is refused.
fn guide(spec: GuideSpec) -> Option<GrammarGuide> {
    static COMPILER: OnceLock<Compiler> = OnceLock::new();
    let compiler = COMPILER.get_or_init(|| {
        let dir = repository().join("model_repository/stories/1");
        let tokenizer = Tokenizer::load(&dir).expect("the demo model's tokenizer");
        Compiler::new(Arc::new(tokenizer), VOCAB_SIZE)
    });
    let compilation = compiler.compile(spec, vec![END_ID], Instant::now()).ok()?;
    compiler.wait(|| compilation.is_done(), Duration::from_secs(60));
    compilation.poll_grammar(Instant::now())?.ok()
}
