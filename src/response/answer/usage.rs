//! The counts of tokens that the option `return_usage` adds to responses.

use inflight_base::Tokens;
use inflight_engine::DraftTotals;
use serde_json::json;

/// The counts of an answer, beside the tokens of prompt and output.
#[derive(Default)]
pub struct Usage {
    /// Tokens of the prompt that were found in the KV cache when the request was first scheduled.
    num_cached: Tokens,
    has_begun: bool,
}

impl Usage {
    /// The request is scheduled for the first time.
    pub fn admit(&mut self, num_cached: Tokens) {
        self.num_cached = num_cached;
    }

    /// The counts that are known before the end, as JSON, for the first response.
    pub fn begin(&mut self) -> Option<String> {
        let is_first = !std::mem::replace(&mut self.has_begun, true);
        is_first.then(|| json!({"num_cached_tokens": self.num_cached.0}).to_string())
    }

    /// All counts, as JSON. `drafts` is there if the client has given draft tokens.
    pub fn end(&self, num_reasoning_tokens: usize, drafts: DraftTotals) -> String {
        json!({
            "num_cached_tokens": self.num_cached.0,
            "num_reasoning_tokens": num_reasoning_tokens,
            "num_draft_tokens": drafts.num_drafted,
            "num_accepted_draft_tokens": drafts.num_accepted,
        })
        .to_string()
    }
}
