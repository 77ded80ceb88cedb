//! The parameters of a request, as a JSON object like the body of Triton's `/generate`.

use inflight_base::RequestError;
use serde_json::{Map, Value};
use triton_inflight::RequestOptions;

use super::Input;

const VOCAB_SIZE: u32 = 100;
const MAX_TOKENS: u32 = 16;
const MAX_SEQUENCES: u32 = 8;

/// Runs one input.
pub fn run(body: &[u8]) -> Input {
    let Ok(parameters) = serde_json::from_slice::<Map<String, Value>>(body) else {
        return Input::Useless;
    };
    let _ = check(&parameters);
    Input::Useful
}

/// Parses the options, and asks for everything that does not depend on the model's tokenizer.
fn check(parameters: &Map<String, Value>) -> Result<(), RequestError> {
    let parameters = parameters.iter();
    let options =
        RequestOptions::parse(parameters.map(|(name, value)| (name.as_str(), value.clone())))?;
    let sequences = options.num_sequences(MAX_SEQUENCES)?;
    assert!((1..=sequences.generated).contains(&sequences.returned));
    assert!(sequences.generated <= MAX_SEQUENCES);
    if let Some(beams) = options.beam_search(MAX_SEQUENCES)? {
        assert!((1..=MAX_SEQUENCES).contains(&beams.width));
    }
    if let Some(guide) = options.guide.spec()? {
        guide.check()?;
    }
    options.post_processor.named()?;
    let max_tokens = options.max_tokens_or(MAX_TOKENS)?;
    let drafts = options.drafts(None, max_tokens as usize);
    assert!(drafts.expected.len() <= max_tokens as usize);
    let mut sampling = options.sampling(&[2], Vec::new(), VOCAB_SIZE)?;
    let ids = sampling.end_ids.iter().chain(&sampling.stop_token_ids);
    assert!(ids.copied().all(|id| id < VOCAB_SIZE));
    options.add_embedding_bias(&mut sampling, VOCAB_SIZE)?;
    assert!(sampling.logit_bias.iter().all(|(id, _)| *id < VOCAB_SIZE));
    Ok(())
}
