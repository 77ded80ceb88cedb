//! The walk-through of TensorRT-LLM's document on request scheduling: five requests under a max batch size
//! of 4 and a max number of tokens of 12, served by a real engine.
//!
//! The document gives the prompts of R1 and R2, 5 tokens each, and says of the others that each is longer than
//! the 2 tokens that are left beside those, and that all of them fit beside two generated tokens. Prompts of 3, 3
//! and 4 tokens do both. R1's second token is its stop token; how long the others are, it does not say.
//!
//! The result is the statistics file that a server would have written.

use std::sync::Arc;

use inflight_base::{BlockSize, Blocks, SequenceId, TokenId, Tokens};
use inflight_engine::{
    BlockReuse, Engine, EngineConfig, NewRequest, PlannedSequence, Sampled, StepOutput,
};
use inflight_sampling::SamplingParams;
use serde_json::{Value, json};

/// The tokens of each prompt.
pub const NUM_PROMPT_TOKENS: [u32; 5] = [5, 5, 3, 3, 4];
/// The requests in a step, at most.
pub const MAX_NUM_REQUESTS: u32 = 4;
/// The tokens in a step, at most.
pub const MAX_NUM_TOKENS: Tokens = Tokens(12);
/// Tokens that each may generate. Only R1 has a stop token before.
const MAX_NEW_TOKENS: Tokens = Tokens(5);
const STOP_TOKEN: TokenId = 1;
const OTHER_TOKEN: TokenId = 0;

/// The walk-through's statistics file: a JSON object a line.
pub fn statistics_file(enable_chunked_context: bool) -> String {
    let mut engine = Engine::new(EngineConfig {
        max_num_requests: MAX_NUM_REQUESTS,
        max_num_tokens: MAX_NUM_TOKENS,
        max_seq_len: Tokens(48),
        block_size: BlockSize::new(2).expect("not zero"),
        chunk_unit: BlockSize::new(2).expect("not zero"),
        num_blocks: Blocks(24),
        enable_chunked_context,
        reuse: BlockReuse::Off,
        record_requests: true,
        ..EngineConfig::default()
    });
    let sampling = Arc::new(SamplingParams {
        stop_token_ids: vec![STOP_TOKEN],
        ..SamplingParams::default()
    });
    for (n, num_prompt_tokens) in (1..).zip(NUM_PROMPT_TOKENS) {
        let prompt = vec![OTHER_TOKEN; num_prompt_tokens as usize];
        let request = NewRequest {
            sampling: Arc::clone(&sampling),
            ..NewRequest::new(SequenceId(n), prompt, MAX_NEW_TOKENS)
        };
        engine.add(request).expect("within the limits");
    }
    let mut file = String::new();
    let mut output = StepOutput::default();
    let mut start_us = 0.0;
    while !engine.is_idle() {
        let step = engine.schedule();
        let model_us = 1000.0 + 100.0 * f64::from(step.num_tokens().0);
        file += &record(&engine, start_us, model_us).to_string();
        file.push('\n');
        start_us += model_us;

        output.sampled.clear();
        let samples = step.sequences().iter().filter(|planned| planned.samples);
        let tokens = samples.map(|planned| (planned.slot, Sampled::Token(next_token(planned))));
        output.sampled.extend(tokens);
        engine.apply(step, &mut output, &mut Vec::new());
    }
    file
}

/// R1's second token is its stop token.
fn next_token(planned: &PlannedSequence) -> TokenId {
    let num_prompt_tokens = NUM_PROMPT_TOKENS[planned.id.0 as usize - 1];
    let num_generated = planned.kv_len + 1 - num_prompt_tokens;
    match (planned.id, num_generated) {
        (SequenceId(1), 2) => STOP_TOKEN,
        _ => OTHER_TOKEN,
    }
}

/// The record of the step that was planned last.
fn record(engine: &Engine, start_us: f64, model_us: f64) -> Value {
    let stats = engine.stats().expect("something is active");
    let mut record = json!(stats.with_timestamp("01-01-1970 00:00:00"));
    record["Step Start (us)"] = json!(start_us);
    record["Step Duration (us)"] = json!(model_us);
    record["Model Duration (us)"] = json!(model_us);
    record["Requests"] = json!(engine.request_stages());
    record
}
