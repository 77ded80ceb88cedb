//! The walk-through of the founding documents (TensorRT-LLM's on request scheduling): five requests of
//! five tokens under a max batch size of 4 and a max number of tokens of 12, served by a real engine.
//!
//! What comes out is the statistics file that a server would have written.

use serde_json::{Value, json};
use triton_inflight::base::{BlockSize, Blocks, RequestId, Tokens};
use triton_inflight::engine::{BlockReuse, Engine, EngineConfig, NewRequest, Sampled, StepOutput};

/// Tokens that each generates. The first is short, and the fifth takes its place.
const NUM_OUTPUT_TOKENS: [u32; 5] = [3, 5, 5, 5, 5];
const NUM_PROMPT_TOKENS: usize = 5;

/// The walk-through's statistics file: a JSON object a line.
pub fn statistics_file(enable_chunked_context: bool) -> String {
    let mut engine = Engine::new(EngineConfig {
        max_num_requests: 4,
        max_num_tokens: Tokens(12),
        max_seq_len: Tokens(48),
        block_size: BlockSize::new(2).expect("not zero"),
        chunk_unit: BlockSize::new(2).expect("not zero"),
        num_blocks: Blocks(24),
        enable_chunked_context,
        reuse: BlockReuse::Off,
        record_requests: true,
        ..EngineConfig::default()
    });
    for (n, max_new_tokens) in (1..).zip(NUM_OUTPUT_TOKENS) {
        let prompt = vec![0; NUM_PROMPT_TOKENS];
        let request = NewRequest::new(RequestId(n), prompt, Tokens(max_new_tokens));
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
        let tokens = samples.map(|planned| (planned.slot, Sampled::Token(0)));
        output.sampled.extend(tokens);
        engine.apply(step, &mut output, &mut Vec::new());
    }
    file
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
